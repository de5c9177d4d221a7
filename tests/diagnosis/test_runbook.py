"""Every verdict has its pages, and is caused in the proof or has a reason why not."""

from __future__ import annotations

import re
from pathlib import Path

from poolgrid.diagnosis.rules import Cause
from tests.observability_proof.verdicts import FAULTS, NOT_CAUSED, OF_TEXT

DOCS = Path(__file__).parents[2] / "docs"
FAULT_NAMES = {cause.value for cause in Cause if cause.is_fault}


def test_every_fault_has_a_section_of_the_runbook_with_a_check_and_a_fix() -> None:
    parts = re.split(r"^### (.+)$", (DOCS / "runbooks/reuse-parted.md").read_text(encoding="utf-8"), flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))

    assert sections.keys() == FAULT_NAMES
    assert not [name for name, text in sections.items() if "- Check: " not in text or "- Fix: " not in text]


def test_the_page_lists_every_verdict_with_its_meaning() -> None:
    page = (DOCS / "doctor.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[?([a-z-]+)\]?[^|]* \| (.+) \|$", page, flags=re.M))

    assert rows == {cause.value: cause.meaning for cause in Cause}


def test_every_verdict_is_caused_in_the_proof_or_has_a_reason_why_not() -> None:
    caused = {fault.cause for fault in FAULTS} | {cause for cause, _, _ in OF_TEXT} | {Cause.COLD, Cause.FOREIGN}

    assert caused | NOT_CAUSED.keys() == set(Cause)
    assert not caused & NOT_CAUSED.keys()
