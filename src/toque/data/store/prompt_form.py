"""Prompt forms: how the model of a store is asked, by the readers that the manifest names."""

from __future__ import annotations

from collections.abc import Iterable

from toque.models.loading.provenance import Form
from toque.sources.documents import DOCUMENTS, TextReader
from toque.sources.prompt_target import PAIRS
from toque.sources.token_arrays import TokenReader


def form_of(readers: Iterable[str]) -> Form:
    """The form by the recorded names of a store's readers.

    A store of several kinds is asked for recipes where it holds any, else as its pairs are; only
    one that holds nothing but texts and token ids is continued.
    """
    found = {_form_of(name) for name in readers}
    order: tuple[Form, ...] = ("recipes", "pairs", "documents")
    return next((form for form in order if form in found), "recipes")


def _form_of(name: str) -> Form:
    if name.startswith(PAIRS):
        return "pairs"
    # An encoding that was given stands behind the name.
    texts = (TextReader().recorded_name, TokenReader.recorded_name, DOCUMENTS)
    return "documents" if name.startswith(texts) else "recipes"
