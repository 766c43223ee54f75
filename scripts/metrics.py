"""GLUE's official metrics, and ROUGE (Lin, 2004)."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


def glue(task: str, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Of a GLUE task, as it is named on the hub: accuracy, and F1 of class 1 or correlations where it has them.

    Predictions are class ids or, of STS-B, similarities from 0 to 5.
    """
    if task == "stsb":
        found = {"pearson": pearsonr, "spearmanr": spearmanr}
        return {name: float(of(predictions, references).statistic) for name, of in found.items()}
    if task == "cola":
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
    found = {"accuracy": float(accuracy_score(references, predictions))}
    return found | ({"f1": float(f1_score(references, predictions))} if task in ("mrpc", "qqp") else {})


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The F-measures of summaries' overlaps with one reference each, from 0 to 1: means over all pairs.

    rouge1 and rouge2 count words and pairs of words, each as often as it occurs in both; rougeL takes the longest
    common subsequence of words. Words are runs of letters and digits, lower-cased and not stemmed. On ASCII text this
    is what the rouge_score package computes with use_stemmer=False; that package drops every other letter. Languages
    written without spaces have to be split into words beforehand.
    """
    pairs = [(_words(a), _words(b)) for a, b in zip(predictions, references, strict=True)]
    scores = {
        "rouge1": [_rouge_n(a, b, 1) for a, b in pairs],
        "rouge2": [_rouge_n(a, b, 2) for a, b in pairs],
        "rougeL": [_rouge_l(a, b) for a, b in pairs],
    }
    return {name: sum(values) / len(values) for name, values in scores.items()}


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _f_measure(common: int, predicted: int, expected: int) -> float:
    return 2 * common / (predicted + expected) if common else 0.0  # 2PR / (P + R)


def _rouge_n(predicted: list[str], expected: list[str], n: int) -> float:
    grams = [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (predicted, expected)]
    return _f_measure((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())


def _rouge_l(predicted: list[str], expected: list[str]) -> float:
    row = [0] * (len(expected) + 1)  # lengths of the longest common subsequences with expected[:j]
    for word in predicted:
        diagonal = 0
        for j, other in enumerate(expected, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if word == other else max(row[j], row[j - 1])
    return _f_measure(row[-1], len(predicted), len(expected))
