import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.evaluation.ngram_metrics import bleu_counts, bleu_of, hash_words

sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu is the oracle")
marks = st.text(alphabet="ab1 .,-\n&;'$\u00a0\u2003½\t<", max_size=40)


def differences(predictions, references):
    counts, oracle = (
        bleu_counts(hash_words(predictions), hash_words(references)),
        sacrebleu.BLEU(force=True),
    )
    for row, p, r in zip(counts, predictions, references, strict=True):
        yield abs(float(bleu_of(row)) - oracle.corpus_score([p], [[r]]).score)
    yield abs(
        float(bleu_of(counts.sum(0)))
        - oracle.corpus_score(predictions, [references]).score
    )


@pytest.mark.parametrize("n", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_real_pairs_score_as_sacrebleu_says(n, real_pairs):
    predictions, references = real_pairs
    assert max(differences(predictions[:n], references[:n])) < 1e-9


@pytest.mark.parametrize(
    "text",
    [
        "", "a", "1,000 eggs, 3...5", "a..b 3.,4 1.. ..2 .5 5. 5.5.5", "12-13 a-b 3--4 -5",
        "x -\ny", "end -\n", "<skipped>a", "a&amp;b &quot;c&quot; &lt;d", "it's {a} [b] `c` ~d/e",
        "crème brûlée à 3½", "tab\tand\u2003space\u00a0x", "no.Break,here", "a\x1cb\x85c",
    ],
)  # fmt: skip
def test_tokens_are_cut_as_mteval_cuts_them(text):
    # A prediction equal to its reference but for one token tells tokens that are cut otherwise.
    assert max(differences([text, text + " z"], [text + " a b c", text])) < 1e-9


SCRIPTS = (
    "把豆腐切成小块，加入酱油。",
    "豆腐を切ってスープ",
    "ใส่น้ำมันลงในกระทะ",
    "ចៀនខ្ទឹមបារាំង",
)


@pytest.mark.parametrize("text", SCRIPTS)
def test_characters_are_words_where_a_script_writes_no_blanks(text):
    counts = bleu_counts(
        hash_words([text, text]), hash_words([text, unicodedata.normalize("NFD", text)])
    )
    assert bleu_of(counts).tolist() == pytest.approx([100.0, 100.0])


def test_chinese_scores_as_sacrebleu_says():
    prediction = "把豆腐切成小块，加入酱油 salt。再煮3.5分钟。"
    reference = "把豆腐切成大块，放入酱油。再煮3分钟 soup。"
    ours = float(
        bleu_of(bleu_counts(hash_words([prediction]), hash_words([reference]))[0])
    )
    oracle = sacrebleu.BLEU(tokenize="zh").corpus_score([prediction], [[reference]])
    assert ours == pytest.approx(oracle.score)


@given(st.lists(st.tuples(marks, marks), min_size=1, max_size=5))
def test_any_marks(pairs):
    predictions, references = (list(side) for side in zip(*pairs, strict=True))
    assert max(differences(predictions, references)) < 1e-9


def test_one_row_of_sums_or_many(real_pairs):
    counts = bleu_counts(hash_words(real_pairs[0][:30]), hash_words(real_pairs[1][:30]))
    sums = np.stack([counts.sum(0), counts[:10].sum(0)])
    assert bleu_of(sums).tolist() == [float(bleu_of(row)) for row in sums]
