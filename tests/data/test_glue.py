"""GLUE files and tokenizers without a hub: files are read as the hub reads them, bad ones are named with the line."""

import warnings
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

from hf_memsave.data.glue import TASKS, GlueDataError, guess_task, read_glue
from hf_memsave.data.wordpiece import SPECIAL_TOKENS, VocabularyError, load_vocab_tokenizer, train_wordpiece
from hf_memsave.errors import MemSaveError

SHARED = Path(__file__).resolve().parents[3] / "shared"

# The header of each official train.tsv, one line below it, and the example that ``nyu-mll/glue`` makes of that line.
OFFICIAL = {
    "cola": (None, "gj04\t0\t*\tHe ate.", {"sentence": "He ate.", "label": 0}),
    "sst2": ("sentence\tlabel", "a fine film \t1", {"sentence": "a fine film ", "label": 1}),
    "mrpc": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "1\t10\t11\tHe ate.\tHe has eaten.",
        {"sentence1": "He ate.", "sentence2": "He has eaten.", "label": 1},
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "7\t1\t2\tWho ate?\tWho has eaten?\t1",
        {"question1": "Who ate?", "question2": "Who has eaten?", "label": 1},
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tnews\tMSRvid\t2012\t1\tnone\tnone\tHe ate.\tHe slept.\t1.500",
        {"sentence1": "He ate.", "sentence2": "He slept.", "label": 1.5},
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse"
        "\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\t1\t1n\tnews\t( He )\t( She )\t(S)\t(S)\tHe ate.\tHe slept.\tneutral\tcontradiction",
        {"premise": "He ate.", "hypothesis": "He slept.", "label": 2},
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel",
        "0\tWho ate?\tHe slept.\tnot_entailment",
        {"question": "Who ate?", "sentence": "He slept.", "label": 1},
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel",
        "0\tHe ate.\tHe slept.\tnot_entailment",
        {"sentence1": "He ate.", "sentence2": "He slept.", "label": 1},
    ),
    "wnli": (
        "index\tsentence1\tsentence2\tlabel",
        "0\tHe ate it.\tHe ate the pie.\t1",
        {"sentence1": "He ate it.", "sentence2": "He ate the pie.", "label": 1},
    ),
}


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path.parent


def official(name: str, folder: Path) -> Path:
    header, line, _ = OFFICIAL[name]
    return write(folder / "train.tsv", *filter(None, (header, line, line)))


def test_the_table_has_the_nine_tasks():
    assert TASKS.keys() == OFFICIAL.keys()
    assert all(name == task.name for name, task in TASKS.items())


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_line_becomes_the_example_of_the_hub_and_the_task_is_guessed(tmp_path, name):
    data = read_glue(official(name, tmp_path / "data"), name, "train")
    assert data.num_rows == 2
    assert data[1] == OFFICIAL[name][2] | {"idx": 1}
    label = datasets.ClassLabel(names=list(TASKS[name].labels)) if TASKS[name].labels else datasets.Value("float32")
    assert data.features["label"] == label
    assert guess_task(tmp_path / "data") == name  # from the columns
    assert guess_task(tmp_path / TASKS[name].folder) == name  # from the folder's name: it is not even opened


def test_test_files_have_labels_of_minus_one(tmp_path):
    write(tmp_path / "test.tsv", "index\tsentence", "0\tHe ate.")
    assert read_glue(tmp_path, "cola", "test")[0] == {"sentence": "He ate.", "label": -1, "idx": 0}


def test_mnli_has_two_dev_sets(tmp_path):
    header, line, example = OFFICIAL["mnli"]
    for name, label in (("dev_matched", "entailment"), ("dev_mismatched", "neutral")):
        write(tmp_path / f"{name}.tsv", f"{header}\tlabel5", f"{line.removesuffix('contradiction')}{label}\tneutral")
    assert TASKS["mnli"].validation_splits == ("validation_matched", "validation_mismatched")
    for split, label in zip(TASKS["mnli"].validation_splits, (0, 1), strict=True):
        assert read_glue(tmp_path, "mnli", split)[0] == example | {"label": label, "idx": 0}
    with pytest.raises(GlueDataError, match="MNLI split: expected one of train, .*got 'validation'"):
        read_glue(tmp_path, "mnli", "validation")


def test_quotes_byte_order_mark_and_windows_line_ends_mean_nothing(tmp_path):
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


# Each mistake: what the file holds, and what the message must say of it.
MISTAKES = {
    "missing column": (["sentence\tlabel", "good\t1", "bad"], "line 3: expected 2 columns .*, got 1. Put"),
    "stray tab": (["sentence\tlabel", "so\tgood\t1"], "line 2: expected 2 columns .*, got 3. Put"),
    "unknown label": (["sentence\tlabel", "good\tyes"], "line 2: expected 0, 1 in column label, got 'yes'. Correct"),
    "other header": (["text\tlabel", "good\t1"], "line 1: expected the columns of SST-2, got text, label; missing"),
    "no line": (["sentence\tlabel"], "expected one example on each line, got none. Fetch"),
    "empty file": ([], "line 1: expected the columns of SST-2, got an empty file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_bad_file_is_named_with_its_line(tmp_path, mistake):
    lines, message = MISTAKES[mistake]
    with pytest.raises(GlueDataError, match=rf"train\.tsv.*{message}"):
        read_glue(write(tmp_path / "train.tsv", *lines), "sst2", "train")


def test_a_score_must_be_a_number(tmp_path):
    header, line, _ = OFFICIAL["stsb"]
    for score in ("high", "nan", ""):
        write(tmp_path / "train.tsv", header, line.removesuffix("1.500") + score)
        with pytest.raises(GlueDataError, match=f"line 2: expected a number in column score, got '{score}'"):
            read_glue(tmp_path, "stsb", "train")


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    (tmp_path / "train.tsv").write_bytes("sentence\tlabel\nfine\t1\ncafé\t1\n".encode("latin-1"))
    with pytest.raises(GlueDataError, match=r"train\.tsv, line 3: expected UTF-8 text, got byte 0xe9"):
        read_glue(tmp_path, "sst2", "train")


def test_a_missing_file_is_named_with_those_found(tmp_path):
    with pytest.raises(GlueDataError, match=r"train\.tsv: expected .*SST-2 data, found an empty folder\. Name"):
        read_glue(tmp_path, "sst2", "train")
    write(tmp_path / "dev.tsv", "sentence\tlabel", "good\t1")
    with pytest.raises(GlueDataError, match=r"train\.tsv: expected .*SST-2 data, found dev\.tsv\. Name"):
        read_glue(tmp_path, "sst2", "train")
    with pytest.raises(GlueDataError, match="no such folder"):
        guess_task(tmp_path / "nowhere")


def test_an_unknown_task_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(GlueDataError, match="expected one of cola, .*, wnli, got 'ax'") as error:
        read_glue(tmp_path, "ax", "train")
    assert isinstance(error.value, MemSaveError) and isinstance(error.value, ValueError)
    with pytest.raises(GlueDataError, match="expected the columns of a GLUE task, got text, class"):
        guess_task(write(tmp_path / "train.tsv", "text\tclass", "good\t1"))


def test_the_few_broken_lines_of_qqp_are_left_out_with_a_warning(tmp_path):
    header, line, _ = OFFICIAL["qqp"]
    write(tmp_path / "train.tsv", header, *[line] * 998, "7\t1\t2\tWho", *[line] * 1001)
    with pytest.warns(UserWarning, match="1 of 2000 lines left out.*line 1000: expected 6 columns"):
        data = read_glue(tmp_path, "qqp", "train")
    assert data.num_rows == 1999
    assert data["idx"][997:999] == [997, 999]
    write(tmp_path / "train.tsv", header, *[line] * 500, "7\t1\t2\tWho")
    with pytest.raises(GlueDataError, match="line 502: expected 6 columns"):
        read_glue(tmp_path, "qqp", "train")


TEXTS = ["The cat sat on the mat.", "A cat, two cats: the cats' café!", "Mats and hats; 50°c in the hat."] * 3


def test_a_trained_tokenizer_has_berts_special_tokens_and_pair_template():
    tokenizer = train_wordpiece(TEXTS, vocab_size=100)
    assert tokenizer.convert_ids_to_tokens(range(5)) == list(SPECIAL_TOKENS)
    assert len(tokenizer) <= 100
    encoded = tokenizer("The cat", "a hat", padding="max_length", max_length=12)
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert "".join(tokens).replace("##", "") == "[CLS]thecat[SEP]ahat[SEP]" + "[PAD]" * tokens.count("[PAD]")
    first = tokens.index("[SEP]") + 1
    last = tokens.index("[PAD]")
    assert encoded["token_type_ids"] == [0] * first + [1] * (last - first) + [0] * (12 - last)
    assert "[UNK]" not in tokenizer.tokenize(" ".join(TEXTS))
    assert tokenizer.tokenize("CAFÉ") == tokenizer.tokenize("cafe")


def test_the_same_texts_give_the_same_ids():
    vocabs = [train_wordpiece(TEXTS, vocab_size=100).get_vocab() for _ in range(8)]
    assert all(vocab == vocabs[0] for vocab in vocabs)


def test_a_small_vocabulary_keeps_the_frequent_letters():
    tokenizer = train_wordpiece(["a" * 3 + " b" * 2 + " c"], vocab_size=len(SPECIAL_TOKENS) + 4)
    assert set(tokenizer.get_vocab()) == {*SPECIAL_TOKENS, "a", "##a", "b", "##b"}


def test_a_tokenizer_survives_saving(tmp_path):
    tokenizer = train_wordpiece(TEXTS, vocab_size=100)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("The cats", "hat")["input_ids"] == tokenizer("The cats", "hat")["input_ids"]


@pytest.mark.parametrize("texts, size, message", [([" "], 100, "got none"), (TEXTS, 6, "at least 7, got 6")])
def test_a_vocabulary_that_cannot_be_trained_is_refused(texts, size, message):
    with pytest.raises(VocabularyError, match=message):
        train_wordpiece(texts, size)


def test_a_vocab_file_decides_ids_and_case(tmp_path):
    path = write(tmp_path / "vocab.txt", *SPECIAL_TOKENS, "cat", "##s") / "vocab.txt"
    assert load_vocab_tokenizer(path)("Cats")["input_ids"] == [2, 5, 6, 3]
    write(path, *SPECIAL_TOKENS, "Cat", "##s")
    assert load_vocab_tokenizer(path)("Cats cats")["input_ids"] == [2, 5, 6, 1, 3]


def test_berts_vocabulary_gives_its_published_ids():
    path = SHARED / "text" / "bert-base-uncased-vocab.txt"
    if not path.is_file():
        pytest.skip(f"needs BERT's vocabulary in {path}")
    load_vocab_tokenizer(path)  # libraries may warn as they are imported
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = load_vocab_tokenizer(path)
    assert len(tokenizer) == 30522
    assert tokenizer("Hello, world!", "Bye.")["input_ids"] == [101, 7592, 1010, 2088, 999, 102, 9061, 1012, 102]


@pytest.mark.parametrize(
    "lines, message",
    [
        (["cat"], r"without \[PAD\], \[UNK\]"),
        ([*SPECIAL_TOKENS, "cat", "hat", "cat"], r"vocab\.txt, line 6: expected each token once, got 'cat' twice"),
        (None, "no such file"),
    ],
)
def test_a_bad_vocab_file_is_refused(tmp_path, lines, message):
    if lines:
        write(tmp_path / "vocab.txt", *lines)
    with pytest.raises(VocabularyError, match=message):
        load_vocab_tokenizer(tmp_path / "vocab.txt")
