"""GLUE files and tokenizers without a hub: files are read as the hub reads them, bad ones are named with the line."""

from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

from arguments import UsageError
from glue_data import TASKS, guess_task, read_glue
from support.script_helpers import SCRIPTS
from wordpiece import SPECIAL_TOKENS, train_wordpiece

SHARED = SCRIPTS.parents[1] / "shared"

PAIR = "index\tsentence1\tsentence2\tlabel"
#: The header of each official train.tsv, one line below it, the example that ``nyu-mll/glue`` makes of that: its texts
#: by column, and its label.
OFFICIAL = {
    "cola": (None, "gj04\t0\t*\tHe ate.", "sentence", 0),
    "sst2": ("sentence\tlabel", "He ate.\t1", "sentence", 1),
    "mrpc": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t10\t11\tHe ate.\tHe slept. ", "sentence1 sentence2", 1),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "7\t1\t2\tHe ate.\tHe slept. \t1",
        "question1 question2", 1,
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tnews\tMSRvid\t2012\t1\tnone\tnone\tHe ate.\tHe slept. \t1.500", "sentence1 sentence2", 1.5,
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse"
        "\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\t1\t1n\tnews\t( He )\t( She )\t(S)\t(S)\tHe ate.\tHe slept. \tneutral\tcontradiction",
        "premise hypothesis", 2,
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel", "0\tHe ate.\tHe slept. \tnot_entailment", "question sentence", 1
    ),
    "rte": (PAIR, "0\tHe ate.\tHe slept. \tnot_entailment", "sentence1 sentence2", 1),
    "wnli": (PAIR, "0\tHe ate.\tHe slept. \t1", "sentence1 sentence2", 1),
}  # fmt: skip


def example_of(name: str) -> dict[str, object]:
    *_, columns, label = OFFICIAL[name]
    return dict(zip(columns.split(), ("He ate.", "He slept. "), strict=False)) | {"label": label}


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode(errors="surrogateescape"))
    return path.parent


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_line_becomes_the_example_of_the_hub_and_a_folders_name_tells_the_task(tmp_path, name):
    header, line, *_ = OFFICIAL[name]
    assert TASKS.keys() == OFFICIAL.keys() and TASKS[name].name == name
    data = read_glue(write(tmp_path / "data" / "train.tsv", *filter(None, (header, line, line))), name, "train")
    assert data.num_rows == 2
    assert data[1] == example_of(name) | {"idx": 1}
    label = datasets.ClassLabel(names=list(TASKS[name].labels)) if TASKS[name].labels else datasets.Value("float32")
    assert data.features["label"] == label
    assert guess_task(tmp_path / TASKS[name].folder) == name


def test_mnli_has_two_dev_sets(tmp_path):
    header, line, *_ = OFFICIAL["mnli"]
    for name, label in (("dev_matched", "entailment"), ("dev_mismatched", "neutral")):
        write(tmp_path / f"{name}.tsv", f"{header}\tlabel5", f"{line.removesuffix('contradiction')}{label}\tneutral")
    assert TASKS["mnli"].validation_splits == ("validation_matched", "validation_mismatched")
    for split, label in zip(TASKS["mnli"].validation_splits, (0, 1), strict=True):
        assert read_glue(tmp_path, "mnli", split)[0] == example_of("mnli") | {"label": label, "idx": 0}


def test_test_files_have_labels_of_minus_one_and_quotes_byte_order_mark_and_windows_line_ends_mean_nothing(tmp_path):
    write(tmp_path / "test.tsv", "index\tsentence", "0\tHe ate.")
    assert read_glue(tmp_path, "cola", "test")[0] == {"sentence": "He ate.", "label": -1, "idx": 0}
    (tmp_path / "train.tsv").write_bytes('\ufeffsentence\tlabel\r\n"a fine\t1\r\nfilm"\t0\r\n\r\n'.encode())
    assert read_glue(tmp_path, "sst2", "train")["sentence"][:] == ['"a fine', 'film"']


@pytest.mark.parametrize(
    ("name", "split", "rows", "share_of_class_1"),
    [("mrpc", "train", 3668, 0.6745), ("sst2", "validation", 872, 0.5092), ("cola", "train", 8551, 0.7044)],
)
def test_official_files_have_their_published_sizes(name, split, rows, share_of_class_1):
    folder = SHARED / "glue" / TASKS[name].folder
    if not folder.is_dir():
        pytest.skip(f"needs the official files in {folder}")
    data = read_glue(folder, guess_task(folder), split)
    assert data.num_rows == rows
    assert sum(data["label"][:]) / rows == pytest.approx(share_of_class_1, abs=1e-4)


SST2, STSB = "sentence\tlabel", OFFICIAL["stsb"][0]
# Each mistake: the task, what its file holds, and what the message must say of it.
MISTAKES = {
    "missing column": ("sst2", [SST2, "good\t1", "bad"], "line 3: expected 2 columns .*, got 1. Put"),
    "stray tab": ("sst2", [SST2, "so\tgood\t1"], "line 2: expected 2 columns .*, got 3. Put"),
    "unknown label": ("sst2", [SST2, "good\tyes"], "line 2: expected 0, 1 in column label, got 'yes'. Correct"),
    "other header": ("sst2", ["text\tlabel", "good\t1"], "line 1: expected the columns of SST-2, got text, label; mis"),
    "no line": ("sst2", [SST2], "expected one example on each line, got none. Fetch"),
    "empty file": ("sst2", [], "line 1: expected the columns of SST-2, got an empty file"),
    "no UTF-8": ("sst2", [SST2, "fine\t1", "caf\udce9\t1"], "line 3: expected UTF-8 text, got byte 0xe9"),
    **{
        f"score {score}": ("stsb", [STSB, OFFICIAL["stsb"][1].removesuffix("1.500") + score], f"a number .*'{score}'")
        for score in ("high", "nan", "")
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_bad_file_is_named_with_its_line(tmp_path, mistake):
    task, lines, message = MISTAKES[mistake]
    with pytest.raises(UsageError, match=rf"train\.tsv.*{message}"):
        read_glue(write(tmp_path / "train.tsv", *lines), task, "train")


def test_a_missing_file_is_named_with_those_found(tmp_path):
    for found in ("an empty folder", r"dev\.tsv"):
        with pytest.raises(UsageError, match=rf"train\.tsv: expected .*SST-2 data, found {found}\. Name"):
            read_glue(tmp_path, "sst2", "train")
        write(tmp_path / "dev.tsv", SST2, "good\t1")
    with pytest.raises(UsageError, match="no such folder"):
        read_glue(tmp_path / "nowhere", "sst2", "train")


def test_a_folder_of_no_tasks_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UsageError, match=r"expected a folder named after a task \(CoLA, .*, WNLI\), got 'data'"):
        guess_task(tmp_path / "data")
    (tmp_path / "SST-2").mkdir()
    with pytest.raises(UsageError, match=rf"got .*\. Name the task's, as in --data_dir {tmp_path}/SST-2\.$"):
        guess_task(tmp_path)


def test_the_few_broken_lines_of_qqp_are_left_out_with_a_warning(tmp_path):
    header, line, *_ = OFFICIAL["qqp"]
    write(tmp_path / "train.tsv", header, *[line] * 998, "7\t1\t2\tWho", *[line] * 1001)
    with pytest.warns(UserWarning, match="1 of 2000 lines left out.*line 1000: expected 6 columns"):
        data = read_glue(tmp_path, "qqp", "train")
    assert data.num_rows == 1999
    assert data["idx"][997:999] == [997, 999]
    write(tmp_path / "train.tsv", header, *[line] * 500, "7\t1\t2\tWho")
    with pytest.raises(UsageError, match="line 502: expected 6 columns"):
        read_glue(tmp_path, "qqp", "train")


TEXTS = ["The cat sat on the mat.", "A cat, two cats: the cats' café!", "Mats and hats; 50°c in the hat."] * 3


def test_a_trained_tokenizer_has_berts_special_tokens_and_pair_template_and_survives_saving(tmp_path):
    tokenizer = train_wordpiece(TEXTS, vocab_size=100)
    assert tokenizer.convert_ids_to_tokens(range(5)) == list(SPECIAL_TOKENS)
    assert len(tokenizer) <= 100
    encoded = tokenizer("The cat", "a hat", padding="max_length", max_length=12)
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert "".join(tokens).replace("##", "") == "[CLS]thecat[SEP]ahat[SEP]" + "[PAD]" * tokens.count("[PAD]")
    first, last = tokens.index("[SEP]") + 1, tokens.index("[PAD]")
    assert encoded["token_type_ids"] == [0] * first + [1] * (last - first) + [0] * (12 - last)
    assert "[UNK]" not in tokenizer.tokenize(" ".join(TEXTS))
    assert tokenizer.tokenize("CAFÉ") == tokenizer.tokenize("cafe")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("The cats", "hat")["input_ids"] == tokenizer("The cats", "hat")["input_ids"]


def test_the_same_texts_give_the_same_ids_and_a_small_vocabulary_keeps_the_frequent_letters():
    vocabs = [train_wordpiece(TEXTS, vocab_size=100).get_vocab() for _ in range(8)]
    assert all(vocab == vocabs[0] for vocab in vocabs)
    tokenizer = train_wordpiece(["a" * 3 + " b" * 2 + " c"], vocab_size=len(SPECIAL_TOKENS) + 4)
    assert set(tokenizer.get_vocab()) == {*SPECIAL_TOKENS, "a", "##a", "b", "##b"}


def test_a_vocabulary_that_cannot_be_trained_is_refused():
    for texts, size, message in (([" "], 100, "got none"), (TEXTS, 6, "at least 7, got 6")):
        with pytest.raises(UsageError, match=message):
            train_wordpiece(texts, size)
