"""Reads a router's prompt model while the rest of its program is imported.

Each takes half a second with a vocabulary of 150,000 tokens, and reading holds the interpreter's lock for little of it.
A router that is started again answers sooner by as much.
"""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.settings import FrontendSettings


class ModelLoading:
    """A prompt model that a thread reads."""

    def __init__(self, settings: FrontendSettings) -> None:
        self._model: Future[PromptModel | None] = Future()
        Thread(target=self._read, args=(settings,), name="prompt model").start()

    def result(self) -> PromptModel | None:
        """Return the model when it is read, ``None`` where the settings name none; raises ``ModelDirectoryError``."""
        return self._model.result()

    def _read(self, settings: FrontendSettings) -> None:
        try:
            self._model.set_result(_model_of(settings))
        except BaseException as error:
            self._model.set_exception(error)


def _model_of(settings: FrontendSettings) -> PromptModel | None:
    if not settings.has_tokenizer:
        return None
    return PromptModel.load(
        settings.model_path,
        settings.served_model_name,
        chat_template=settings.chat_template,
        tokenization_cache_bytes=settings.tokenization_cache_bytes,
        word_cache=settings.word_cache,
        proves_later=True,
    )
