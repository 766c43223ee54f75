"""The metrics of GLUE as a local ``evaluate`` module: ``evaluate.load("scripts/metrics/glue", "mrpc")``, offline."""

import datasets
import evaluate
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_DESCRIPTION = """\
The official metrics of the General Language Understanding Evaluation benchmark, by task name as on the hub:
accuracy (sst2, mnli, qnli, rte, wnli), accuracy and F1 of class 1 (mrpc, qqp), Matthews correlation (cola),
Pearson and Spearman correlation (stsb).
"""

_CITATION = """\
@inproceedings{wang2019glue,
  title={{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle={ICLR},
  year={2019},
}
"""

_KWARGS_DESCRIPTION = """\
Args:
    predictions: class ids, or for stsb the predicted similarity from 0 to 5.
    references: the same, as labelled.

Returns:
    A dictionary of floats: "accuracy", "f1", "matthews_correlation", "pearson", "spearmanr", as the task has them.
"""


def _accuracy(predictions, references):
    return {"accuracy": accuracy_score(references, predictions)}


def _accuracy_and_f1(predictions, references):
    return _accuracy(predictions, references) | {"f1": f1_score(references, predictions)}


def _matthews(predictions, references):
    return {"matthews_correlation": matthews_corrcoef(references, predictions)}


def _correlations(predictions, references):
    return {
        "pearson": pearsonr(predictions, references).statistic,
        "spearmanr": spearmanr(predictions, references).statistic,
    }


_METRICS = {
    "cola": _matthews,
    "sst2": _accuracy,
    "mrpc": _accuracy_and_f1,
    "qqp": _accuracy_and_f1,
    "stsb": _correlations,
    "mnli": _accuracy,
    "qnli": _accuracy,
    "rte": _accuracy,
    "wnli": _accuracy,
}


class Glue(evaluate.Metric):
    """One GLUE task's metric; the task is the configuration name."""

    def _info(self):
        if self.config_name not in _METRICS:
            raise KeyError(f"GLUE metric for task {self.config_name!r}: expected one of {', '.join(_METRICS)}.")
        value = datasets.Value("float32" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions, references):
        return {name: float(value) for name, value in _METRICS[self.config_name](predictions, references).items()}
