"""ROUGE-1, ROUGE-2 and ROUGE-L as a local ``evaluate`` module: ``evaluate.load("scripts/metrics/rouge")``, offline."""

import re
from collections import Counter

import datasets
import evaluate

_DESCRIPTION = """\
ROUGE (Lin, 2004): the F-measure of the overlap of a summary with one reference, averaged over all pairs, from 0 to 1.
rouge1 and rouge2 count words and pairs of words, each as often as it occurs in both; rougeL takes the longest common
subsequence of words. Words are runs of letters and digits, lower-cased and not stemmed. On ASCII text this is what the
rouge_score package computes with use_stemmer=False; that package drops every other letter, this module does not.
Languages written without spaces have to be split into words beforehand.
"""

_CITATION = """\
@inproceedings{lin2004rouge,
  title={{ROUGE}: A Package for Automatic Evaluation of Summaries},
  author={Lin, Chin-Yew},
  booktitle={Text Summarization Branches Out},
  year={2004},
}
"""

_KWARGS_DESCRIPTION = """\
Args:
    predictions: the summaries, one string each.
    references: one reference for each, a string.

Returns:
    A dictionary of floats: "rouge1", "rouge2" and "rougeL".
"""


def _words(text):
    return re.findall(r"[^\W_]+", text.lower())


def _f_measure(common, predicted, expected):
    return 2 * common / (predicted + expected) if common else 0.0  # 2PR / (P + R)


def _rouge_n(predicted, expected, n):
    grams = [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (predicted, expected)]
    return _f_measure((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())


def _rouge_l(predicted, expected):
    row = [0] * (len(expected) + 1)  # lengths of the longest common subsequences with expected[:j]
    for word in predicted:
        diagonal = 0
        for j, other in enumerate(expected, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if word == other else max(row[j], row[j - 1])
    return _f_measure(row[-1], len(predicted), len(expected))


class Rouge(evaluate.Metric):
    """ROUGE-1, ROUGE-2 and ROUGE-L F-measures of one reference each."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions, references):
        pairs = [(_words(a), _words(b)) for a, b in zip(predictions, references, strict=True)]
        scores = {
            "rouge1": [_rouge_n(a, b, 1) for a, b in pairs],
            "rouge2": [_rouge_n(a, b, 2) for a, b in pairs],
            "rougeL": [_rouge_l(a, b) for a, b in pairs],
        }
        return {name: sum(values) / len(values) for name, values in scores.items()}
