"""Reading a pool grid: text in, a valid document out, or every problem at once.

The order: JSON (``json_text``), Dynamo's form turned into ours (``dynamo``), the rules that span fields
(``checks``), each field on its own (the models). Problems of all four are collected; those of a document in
Dynamo's form name the places of that form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from poolgrid.global_router.core.document.checks import RULES, check_document
from poolgrid.global_router.core.document.dynamo import is_dynamo_document, translate_document
from poolgrid.global_router.core.document.grid_document import GridDocument
from poolgrid.global_router.core.document.json_paths import value_text
from poolgrid.global_router.core.document.json_text import read_json
from poolgrid.global_router.core.document.model_validation import validate_model
from poolgrid.global_router.core.document.problems import GridDocumentError, Problem, Severity

DocumentForm = Literal["poolgrid", "dynamo"]


@dataclass(frozen=True, slots=True)
class LoadedDocument:
    """A valid document, the form it was written in, and what is odd about it."""

    document: GridDocument
    form: DocumentForm
    warnings: tuple[Problem, ...]
    source: str


def load_document(text: bytes | str, source: str = "") -> LoadedDocument:
    """Read a pool grid in our form or in Dynamo's; raise ``GridDocumentError`` with every problem."""
    value, problems = read_json(text)
    if problems and value is None:
        raise GridDocumentError(tuple(problems), (), source)
    if not isinstance(value, dict):
        problems.append(Problem((), f"is {value_text(value)}, must be an object"))
        raise GridDocumentError(tuple(problems), (), source)
    value.pop("$schema", None)
    if is_dynamo_document(value):
        form: DocumentForm = "dynamo"
        translation = translate_document(value)
        clean, found = check_document(translation.data, RULES)
        document, field_problems = validate_model(GridDocument, clean)
        problems += translation.problems
        problems += [
            replace(problem, path=translation.place(problem.path))
            for problem in [*found, *field_problems]
            if not translation.is_explained(translation.place(problem.path))
        ]
        broken = _accepted_rules(found)
        if document is not None and broken:
            document = document.model_copy(update={"accept": broken})
    else:
        form = "poolgrid"
        clean, found = check_document(value)
        document, field_problems = validate_model(GridDocument, clean)
        problems += found + field_problems
    problems = list(dict.fromkeys(problems))
    errors = tuple(problem for problem in problems if problem.severity is Severity.ERROR)
    warnings = tuple(problem for problem in problems if problem.severity is Severity.WARNING)
    if errors or document is None:
        raise GridDocumentError(errors, warnings, source)
    return LoadedDocument(document, form, warnings, source)


def _accepted_rules(found: list[Problem]) -> tuple[str, ...]:
    return tuple(sorted({problem.rule for problem in found if problem.rule}))
