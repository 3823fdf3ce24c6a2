"""Prompts from the user's own rows: which field is what, and every way in which data is wrong."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.tasks import get_task, read_prompts
from jetrl.types import Prompt, Score, Turn

ROWS = [{"prompt": f"{i}+1=?", "answer": str(i + 1)} for i in range(20)]
USER = {"role": "user", "content": "2+3?"}
FIVE, SIX = ({"role": "assistant", "content": text} for text in "56")
ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": ADD}]}
ADD_AS_TEXT = {**ADD, "arguments": '{"a": 2, "b": 3}'}
CALLED_AS_TEXT = {**CALLS, "tool_calls": [{"id": "1", "function": ADD_AS_TEXT}]}
TOOL = {"role": "tool", "content": "5"}
THOUGHT = {"reasoning_content": "2, 3"}
VERL = {
    "prompt": [USER],
    "reward_model": {"style": "rule", "ground_truth": 5},
    "extra_info": {"index": 7, "unit": "m", "worked": "5."},
}


def write(path: Path, *rows: object) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_a_file_of_questions_and_answers(tmp_path: Path) -> None:
    task = get_task("dataset", path=write(tmp_path / "sums.jsonl", *ROWS))
    train, test = read_prompts(task, "train"), read_prompts(task, "test")
    assert (len(train), len(test)) == (18, 2)
    assert not {p.messages[0]["content"] for p in train} & {p.messages[0]["content"] for p in test}
    path = tmp_path / "sums.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # an editor's byte order mark
    assert read_prompts(task, "train") == train
    prompt = train[0]
    assert prompt.messages == ({"role": "user", "content": prompt.metadata["prompt"]},)
    assert task.score(prompt, f"#### {prompt.answer}") == Score(1.0, {"answered": 1.0})
    assert task.score(prompt, "#### 99") == Score(0.0, {"answered": 1.0})
    assert task.score(prompt, "no idea") == Score(0.0, {"answered": 0.0})


def test_rows_that_ask_the_same_are_in_one_split(tmp_path: Path) -> None:
    asked = [f"{i % 5}+1=?" for i in range(35)]
    asked[7] = " 2+1=?\n"  # white space does not count
    rows = [{"prompt": text, "answer": "1", "row": i} for i, text in enumerate(asked)]
    path = write(tmp_path / "rows.jsonl", *rows)
    for options in ({}, {"template": "Is {prompt}", "seed": 1}, {"format": "text", "seed": 2}):
        task = get_task(path, **options)
        splits = {split: read_prompts(task, split) for split in ("train", "test", "all")}
        held_out, trained = (
            {prompt.asked.replace(" ", "").strip() for prompt in splits[split]}
            for split in ("test", "train")
        )
        assert (len(held_out), len(trained), held_out & trained) == (1, 4, set())
        found = [prompt.metadata["row"] for split in ("train", "test") for prompt in splits[split]]
        assert sorted(found) == [prompt.metadata["row"] for prompt in splits["all"]] == [*range(35)]
    # Without repeated rows the draw is that of earlier versions: resumed runs keep their data.
    task = get_task(write(tmp_path / "sums.jsonl", *ROWS))
    assert [prompt.answer for prompt in read_prompts(task, "test")] == ["11", "19"]
    same = get_task(write(tmp_path / "same.jsonl", *ROWS[:1] * 3))
    assert len(read_prompts(same, "train")) == 3
    with pytest.raises(UserError, match="its 3 examples ask one and the same prompt; nothing can"):
        read_prompts(same, "test")


def test_fields_template_and_text(tmp_path: Path) -> None:
    row = {"q": "2+3", "gold": 5, "worked": "2+3 = 5", "key": "a", "unit": "apples {}"}
    path = write(tmp_path / "rows.jsonl", row, {**row, "key": "b"})
    fields = {"answer": "gold", "demonstration": "worked", "id": "key"}
    options = {"format": "text", "stop": ["\n"], "checker": "exact"}
    task = get_task("dataset", path=path, template="{q} in {unit}?\nA:", **fields, **options)
    prompt, other = read_prompts(task, "all")
    assert (prompt.text, prompt.answer) == ("2+3 in apples {}?\nA:", "5")
    assert (prompt.id, other.id) == ("a", "b")
    assert (task.demonstration(prompt), task.stops(prompt)) == ("2+3 = 5", ("\n",))
    assert [task.score(prompt, text) for text in (" 5 ", "5.0", "")] == [1.0, 0.0, 0.0]


def test_messages_are_taken_as_they_are(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    path = write(tmp_path / "train.jsonl", {"messages": messages, "answer": "5"})
    task = get_task("dataset", path=str(tmp_path), prompt="messages")
    assert read_prompts(task, "train")[0].messages == tuple(messages)
    assert task.splits == ("train",)
    with pytest.raises(UserError, match=r"format is 'text'"):
        read_prompts(get_task("dataset", path=path, prompt="messages", format="text"), "train")


def test_parquet_and_saved_data_sets_are_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    (tmp_path / "files").mkdir()
    data.to_parquet(str(tmp_path / "files" / "train.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    both = datasets.DatasetDict({"train": data, "held": data.select(range(3))})
    both.save_to_disk(str(tmp_path / "dict"))
    lines = get_task("dataset", path=write(tmp_path / "rows.jsonl", *ROWS))
    expected = read_prompts(lines, "train")
    assert read_prompts(get_task("dataset", path=tmp_path / "saved"), "train") == expected
    parquet = get_task("dataset", path=tmp_path / "files")
    splits = get_task("dataset", path=tmp_path / "dict")
    assert (parquet.splits, splits.splits) == (("train",), ("train", "held"))
    assert read_prompts(parquet, "train") == read_prompts(splits, "train")
    assert [p.answer for p in read_prompts(splits, "held")] == ["1", "2", "3"]
    with pytest.raises(UserError, match="no split 'test'"):
        read_prompts(splits, "test")
    (tmp_path / "files" / "train.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(UserError, match=r"train.parquet: not a Parquet file"):
        read_prompts(parquet, "train")


SOLVED = Score(1.0, {"answered": 1.0})
REGEX = {"checker": "regex", "pattern": r"<answer>\s*(.*?)</answer>"}


@pytest.mark.parametrize(
    "options, answer, completion, score",
    [
        ({}, r"\frac{1}{2}", r"so \boxed{0.5}", SOLVED),
        ({}, "... so it is\n#### 1,200", "it costs 1200", Score(1.0, {"answered": 0.0})),
        ({"strict": True}, "7", "it is 7", Score(0.0, {"answered": 0.0})),
        (REGEX, "blue", "<answer>red</answer>, <answer> blue </answer>", SOLVED),
        (REGEX, "blue", "<answer>red</answer>", Score(0.0, {"answered": 1.0})),
        (REGEX, "blue", "blue", Score(0.0, {"answered": 0.0})),
        ({"checker": "regex", "pattern": "b.ue", "answer": ""}, None, "a blue sky", SOLVED),
    ],
)
def test_checkers(tmp_path, options, answer, completion, score) -> None:
    task = get_task("dataset", path=write(tmp_path / "rows.jsonl", *ROWS), **options)
    assert task.score(Prompt(id="0", text="?", answer=answer), completion) == score


MISSING = "question,answer\nWhat is 1 plus 1?,2\nWhat is the name of it?,\nWhat is 2 plus 2?,4\n"
NOTHING = ["nan", "NaN", "#N/A", "TBD", "?", "???", "N/A", "None", "null", "(n/a)", " ", "TODO."]


@pytest.mark.parametrize("options", [{}, {"checker": "exact"}, REGEX], ids=["math", "exact", "re"])
def test_a_missing_right_answer_is_refused_by_its_line(tmp_path, options) -> None:
    (tmp_path / "missing.csv").write_text(MISSING)
    task = get_task(str(tmp_path / "missing.csv"), **options)
    with pytest.raises(UserError, match=r"missing.csv, line 3: field 'answer'.* drop the row"):
        assert [read_prompts(task, split) for split in ("train", "test")]
    for answer in NOTHING:
        write(tmp_path / "train.jsonl", ROWS[0], {"prompt": "?", "answer": answer})
        with pytest.raises(UserError, match=r"train.jsonl, line 2: field 'answer' \(the answer\)"):
            read_prompts(get_task("dataset", path=str(tmp_path), **options), "train")


@pytest.mark.parametrize("answer", ["Na", "none", "Nancy", "-", "unknown", "nano"])
def test_words_are_right_answers(tmp_path, answer) -> None:
    path = write(tmp_path / "rows.jsonl", *[{"prompt": "?", "answer": answer}] * 2)
    task = get_task(path, checker="exact")
    assert task.score(read_prompts(task, "train")[0], answer) == 1.0


@pytest.mark.parametrize("answer", ["-", "...", "\\text{N/A}", "\\boxed{?}", "The answer is TBD"])
def test_math_needs_a_value(tmp_path, answer) -> None:
    write(tmp_path / "rows.jsonl", {"prompt": "?", "answer": answer})
    with pytest.raises(UserError, match=r"line 1: .*'math' reads no answer in it"):
        read_prompts(get_task("dataset", path=str(tmp_path)), "rows")


def test_whole_numbers_of_parquet_are_whole(tmp_path: Path) -> None:
    """A column of whole numbers with a gap is stored as floats."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"prompt": ["a", "b"], "answer": [1.0, 2.5]})
    parquet.write_table(table, tmp_path / "train.parquet")
    task = get_task("dataset", path=str(tmp_path), checker="exact")
    one, other = read_prompts(task, "train")
    assert [task.score(one, "1"), task.score(other, "2.5"), task.score(one, "2.5")] == [1, 1, 0]


def test_numbers_are_written_out(tmp_path: Path) -> None:
    """Python would write 1e-05, which no checker takes for a number."""
    answers = (18.0, 0.00001, 2.5e22, -1e-7, 123456789012345678901234567890, 0.1)
    path = write(tmp_path / "train.jsonl", *({"prompt": f"{a}?", "answer": a} for a in answers))
    task = get_task("dataset", path=str(Path(path).parent))
    prompts = read_prompts(task, "train")
    assert [p.answer for p in prompts[:3]] == ["18", "0.00001", "25000000000000000000000"]
    assert [p.answer for p in prompts[3:5]] == ["-0.0000001", str(answers[4])]
    for prompt in prompts:
        assert task.score(prompt, f"#### {prompt.answer}").reward == 1


def test_a_checker_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    score = "len(completion) - prompt.metadata['limit']"
    file.write_text(f"def length(prompt, completion):\n    return {score}\n")
    rows = {"prompt": "be long", "limit": 3}, {"prompt": "?", "limit": 9}
    path = write(tmp_path / "rows.jsonl", *rows)
    options = {"path": path, "answer": "", "checker": f"{file}:length"}
    task = get_task("dataset", **options)
    by_text = {p.messages[0]["content"]: p for s in task.splits for p in read_prompts(task, s)}
    assert task.score(by_text["be long"], "12345") == 2
    for checker, message in (
        (f"{file}:lenght", r"no function 'lenght'; did you mean length\?"),
        (f"{tmp_path}/none.py:length", "No such file"),
        ("maths", r"checker = 'maths'; did you mean math\?"),
    ):
        with pytest.raises(UserError, match=message):
            get_task("dataset", **{**options, "checker": checker})


@pytest.mark.parametrize(
    "rows, options, message",
    [
        ([ROWS[0], "{not json"], {}, r"rows.jsonl, line 2: not JSON: .*column 2"),
        (
            [{"promt": 1}],
            {},
            r"line 1: no field 'prompt'; did you mean promt\? \(task.options.prom",
        ),
        ([ROWS[0], {"prompt": "?"}], {}, r"line 2: no field 'answer'; there is: prompt"),
        ([{"prompt": "?", "answer": [1]}], {}, r"line 1: field 'answer' .*not a text or a number$"),
        ([{"prompt": "?", "answer": [1]}], {"checker": "zero"}, 'options.answer = "" leaves it'),
        ([{"prompt": [{"role": "user"}], "answer": 1}], {}, "line 1: .*needs a role and a content"),
        ([{"conversations": [{"from": "human", "value": "?"}]}], {}, "ShareGPT.* from to role"),
        ([{"instruction": "?", "output": "5"}], {}, r"Alpaca rows: task\.options\.template="),
        (ROWS, {"template": "{queston}"}, r"line 1: no field 'queston'.*task.options.template"),
        (
            [{**ROWS[0], "id": 1}, {**ROWS[1], "id": 1}, ROWS[2] | {"id": 2}],
            {"id": "id"},
            r"line 2: id '1' is also that of .*line 1",
        ),
        ([ROWS[0], {"prompt": None, "answer": "1"}], {}, r"line 2: field 'prompt' is empty"),
        (["[", '{"a": 1},', "]"], {}, r"rows.jsonl, line 3: not JSON: .*one array of objects$"),
        (['[{"prompt": "?"}, 5]'], {}, r"rows.jsonl, row 1: a JSON object is expected, not '5'"),
        ([], {}, r"no rows in split 'rows'"),
        (['{"prompt": "?", "answer": NaN}'], {}, r"line 1: field 'answer' \(the answer\) is nan"),
        (
            [ROWS[0], {"prompt": "?", "answer": "so it is \\boxed{12"}],
            {},
            r"line 2: field 'answer' .*reads no answer in it; give a number or LaTeX",
        ),
        (['{"prompt": "\\ud83d", "answer": "1"}'], {}, r"line 1: .*half of a character"),
        ([VERL], {"answer": "reward_model"}, "reward_model.style or reward_model.ground_truth$"),
        ([VERL], {"answer": "reward_model.truth"}, r"'reward_model.truth'; did you mean reward_"),
        (
            [VERL],
            {"answer": "extra_info.unit", "template": "{prompt}"},
            "not a text that .*template",
        ),
        ([{"chosen": "H: 2+3? A: 5", "rejected": "H: 2+3? A: 6"}], {}, "no field 'prompt'"),
        ([{"messages": [FIVE], "answer": "5"}], {}, r"field 'messages' is \[\], not a text or"),
        ([{"prompt": "", "answer": "5"}], {}, r"line 1: field 'prompt' is empty; fill it"),
        ([{"prompt": "?", "gold": 5}], {}, "no field 'answer'; there is: prompt, gold .*options.a"),
        (
            [{"prompt": "?", "messages": [USER, FIVE]}],
            {"demonstration": "messages"},
            r"field 'messages' \(the demonstration\): expected one message of the assistant, after",
        ),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, rows, options, message) -> None:
    write(tmp_path / "rows.jsonl", *rows)
    task = get_task("dataset", path=str(tmp_path), **options)
    assert task.splits == ("rows",)
    with pytest.raises(UserError, match=message):
        read_prompts(task, "rows")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"path": "none.jsonl"}, "no such file or folder; give a folder with train.jsonl"),
        ({"format": "chatty"}, "format = 'chatty'"),
        ({"test_share": 1.0}, "test_share = 1.0"),
        ({"checker": ["math"], "weights": ["a"]}, "task.options.weights.0 = 'a': "),
        ({"answer": ""}, "checker 'math' needs an answer"),
        ({"checker": "regex"}, "the checker 'regex' needs one"),
        ({"checker": "regex", "pattern": "("}, "not a regular expression: missing"),
        ({"checker": "regex", "pattern": "a{99999999999}"}, "not a regular expression: the rep"),
        ({"pattern": "x"}, "only the checker 'regex'"),
        ({"checker": "exact", "strict": True}, "only the checker 'math'"),
        *(({"stop": stop}, "task.options.stop = .* a list") for stop in ("\n", [""], [5], 5)),
        ({"promt": "q"}, r"did you mean prompt\?"),
    ],
)
def test_bad_options(tmp_path, options, message) -> None:
    path = write(tmp_path / "rows.jsonl", *ROWS)
    with pytest.raises(UserError, match=message):
        get_task("dataset", **{"path": path, **options})


def test_a_dotted_path_names_a_part_of_a_row(tmp_path):
    write(tmp_path / "train.jsonl", VERL)
    fields = {"id": "extra_info.index", "demonstration": "extra_info.worked"}
    fields |= {"template": "In {extra_info.unit}, {0.5} and {...}?"}
    task = get_task("dataset", path=str(tmp_path), answer="reward_model.ground_truth", **fields)
    (prompt,) = read_prompts(task, "train")
    assert (prompt.id, prompt.answer, prompt.asked) == ("7", "5", "In m, {0.5} and {...}?")
    assert task.demonstration(prompt) == "5."


@pytest.mark.parametrize(
    "options",
    [
        {"template": r"{prompt} Answer in \boxed{answer}."},
        {"template": "{gold.value}", "answer": "gold.value"},
        {"template": "{gold}", "answer": "gold.value"},
        *({"template": "{prompt} {worked}", r: "worked"} for r in ("demonstration", "chosen")),
        {"template": "{bad}", "chosen": "good", "rejected": "bad"},
    ],
)
def test_a_template_cannot_print_the_answer(tmp_path, options):
    path = write(tmp_path / "rows.jsonl", *ROWS)
    with pytest.raises(UserError, match=r"template takes \{\w+.*put spaces inside"):
        read_prompts(get_task("dataset", path=path, **options), "train")
    spaced = options["template"].replace("{", "{ ").replace("}", " }")
    prompts = read_prompts(get_task("dataset", path=path, template=spaced), "train")
    assert prompts[0].asked == spaced


def test_messages_as_json_text_are_messages(tmp_path):
    text = json.dumps(VERL["prompt"])
    plain = ["[1, 2] has which sum?", '["a"]', "[]", '[{"x": 1}]', '{"role": "r", "content": "c"}']
    rows = [{"prompt": p, "answer": "5"} for p in (f" {text}", *plain)]
    path = Path(write(tmp_path / "train.jsonl", *rows)).parent
    prompts = read_prompts(get_task("dataset", path=str(path)), "train")
    assert prompts[0].messages == tuple(VERL["prompt"])
    assert [p.asked for p in prompts[1:]] == plain
    with pytest.raises(UserError, match="format is 'text'"):
        read_prompts(get_task("dataset", path=str(path), format="text"), "train")
    for broken in (str(VERL["prompt"]), text[:-1]):
        write(tmp_path / "train.jsonl", {"prompt": broken, "answer": "5"})
        with pytest.raises(UserError, match=r"line 1: .*looks like messages .* store a list"):
            read_prompts(get_task("dataset", path=str(path)), "train")


@pytest.mark.parametrize(
    "files, message",
    [
        (
            ["train-00000-of-00002.jsonl"],
            r"1 of 2 shards are here, and train-00001-of-00002.jsonl ",
        ),
        (
            ["train-00002-of-00002.jsonl"],
            r"1 of 2 shards are here, and train-00001-of-00002.jsonl ",
        ),
        (["train-0-of-999999999999999.jsonl"], "1 of 999999999999999 shards"),
        ([f"train-0000{i}-of-0000{n}.jsonl" for i, n in ((0, 1), (0, 2), (1, 2))], "several sets"),
        ([f"train-00000-of-00001-{d * 16}.jsonl" for d in "0a"], "several sets: train-00000-of"),
        (["train-00000-of-00002.jsonl", "train-00000-of-00002.json"], "several sets"),
        (["train-00000-of-00001.jsonl", "train-00001-of-00001.jsonl"], "several sets"),
        (["train.jsonl", "train-00000-of-00001.jsonl"], "several sets: train-00000-of-00001.jsonl"),
        (["train.jsonl", "train.csv"], r"several sets: train.jsonl, train.csv; keep those of one"),
        (["train.jsonl", "data/train.jsonl"], "several sets: train.jsonl, data/train.jsonl; keep"),
    ],
)
def test_half_a_set_and_two_sets_are_refused(tmp_path, files, message):
    (tmp_path / "data").mkdir()
    for file in files:
        write(tmp_path / file, *ROWS[:3])
    write(tmp_path / "test.jsonl", *ROWS[3:6])
    task = get_task(str(tmp_path))
    assert len(read_prompts(task, "test")) == 3
    with pytest.raises(UserError, match=rf"split 'train' .*{message}"):
        read_prompts(task, "train")


@pytest.mark.parametrize("first", [0, 1])
def test_a_whole_set_of_shards_is_read_in_order(tmp_path, first):
    for n in range(3):
        name = f"train-{n + first:05}-of-00003-0123456789abcdef.jsonl"
        write(tmp_path / name, *ROWS[5 * n : 5 * n + 5])
    prompts = read_prompts(get_task(str(tmp_path)), "train")
    assert [prompt.answer for prompt in prompts] == [row["answer"] for row in ROWS[:15]]


def csv_of(rows, delimiter):
    lines = io.StringIO()
    writer = csv.DictWriter(lines, rows[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return lines.getvalue()


LONG = [{"prompt": 'a, "b"\nc;\u2028?', "answer": "1"}, *ROWS]


@pytest.mark.parametrize(
    "name, text",
    [
        ("rows.json", json.dumps(LONG, indent=1)),
        ("rows.json", "\n".join(map(json.dumps, LONG))),
        ("rows.jsonl", "\ufeff \n" + json.dumps(LONG)),
        ("rows.csv", "\ufeff" + csv_of(LONG, ",")),
        ("rows.csv", csv_of(LONG, ";")),
        ("rows.tsv", csv_of(LONG, "\t")),
    ],
)
def test_every_form_has_the_same_rows(tmp_path, name, text):
    path = Path(write(tmp_path / "expected.jsonl", *LONG))
    expected = read_prompts(get_task(str(path)), "train")
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert read_prompts(get_task(str(tmp_path / name)), "train") == expected


def test_quotes_after_a_space_are_quotes(tmp_path):
    (tmp_path / "rows.csv").write_text('prompt, answer\n"a, ""b""", "1, 2"\nc, " 3"\nd,4\n')
    task = get_task(str(tmp_path / "rows.csv"), checker="exact", test_share=0.1)
    prompts = [*read_prompts(task, "train"), *read_prompts(task, "test")]
    found = {prompt.messages[0]["content"]: prompt.answer for prompt in prompts}
    assert found == {'a, "b"': "1, 2", "c": " 3", "d": "4"}


def test_a_folder_of_the_hub_has_shards_in_data(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "dataset_infos.json").write_text("{}")
    write(tmp_path / "data" / "train-00000-of-00002.jsonl", *ROWS[:2])
    write(tmp_path / "data" / "train-00001-of-00002.jsonl", *ROWS[2:])
    write(tmp_path / "data" / "test.jsonl", *ROWS[:3])
    task = get_task(str(tmp_path))
    assert task.splits[0] == "train"
    assert [len(read_prompts(task, split)) for split in ("train", "test")] == [20, 3]
    words = "no split 'dev'; it has 'train', 'dataset_infos', 'test'; task.split and task.eval_s"
    with pytest.raises(UserError, match=words):
        read_prompts(task, "dev")
    with pytest.raises(UserError, match=r"task.path = x: give one"):
        get_task(str(tmp_path), path="x")


@pytest.mark.parametrize(
    "text, message",
    [
        ("prompt,answer\na,1,2\n", r"line 2: not one value for each of the header's 2 columns"),
        ("prompt,answer\na\n", "line 2: not one value for each"),
        ('prompt,answer\n"a"b,1\n', "after line 1: not CSV: .* expected after"),
        ("prompt|answer\na|1\n", r"line 2: no field 'prompt'; did you mean prompt\|answer"),
        ("", "no rows in split"),
        ("prompt,answer,answer\na,1,2\n", "line 1: several columns are called 'answer'"),
    ],
)
def test_bad_tables_are_named_by_file_and_line(tmp_path, text, message):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(get_task(str(tmp_path / "rows.csv")), "train")


@pytest.mark.parametrize(
    "row, answer, worked, pair",
    [
        (VERL, "5", None, None),
        ({"prompt": [USER], "solution": "5", "messages": [SIX, FIVE]}, "5", None, None),
        ({"problem": "2+3?", "solution": "so \\boxed{5}", "answer": 5}, "5", None, None),
        ({"prompt": "2+3?", "completion": "5"}, None, "5", None),
        ({"prompt": [USER], "completion": [FIVE]}, None, "5", None),
        ({"messages": [USER, FIVE]}, None, "5", None),
        ({"messages": [USER], "answer": "5"}, "5", None, None),
        ({"messages": [USER, CALLS]}, None, CALLS, None),
        ({"messages": [USER, CALLED_AS_TEXT]}, None, CALLS, None),
        ({"messages": json.dumps([USER, FIVE | THOUGHT])}, None, FIVE | THOUGHT, None),
        (
            {"prompt": [USER], "completion": [CALLS, TOOL, FIVE]},
            None,
            [Turn(CALLS, TOOL), Turn("5")],
            None,
        ),
        ({"prompt": [USER], "chosen": [CALLS], "rejected": [SIX]}, None, None, (CALLS, "6")),
        ({"prompt": [USER], "chosen": [FIVE], "rejected": [SIX]}, None, None, ("5", "6")),
        ({"chosen": [USER, FIVE], "rejected": [USER, SIX]}, None, None, ("5", "6")),
        ({"prompt": "2+3?", "chosen": "5", "rejected": "6"}, None, None, ("5", "6")),
    ],
)
def test_rows_of_verl_and_trl_are_read_as_they_are(tmp_path, row, answer, worked, pair):
    task = get_task(str(Path(write(tmp_path / "train.jsonl", row)).parent))
    (prompt,) = read_prompts(task, "train")
    assert (prompt.messages, prompt.answer) == ((USER,), answer)
    assert (task.demonstration(prompt), task.preference(prompt)) == (worked, pair)
    if answer is None:
        for scored in (task.self_test, lambda: task.score(prompt, "5")):
            with pytest.raises(UserError, match=r"row train-0 has none: .*if you only fine-tune"):
                scored()
        assert get_task(str(tmp_path), checker="zero").score(prompt, "5") == 0


@pytest.mark.parametrize(
    "row, field",
    [
        ({"prompt": [USER], "chosen": [FIVE]}, "rejected"),
        ({"prompt": [USER], "rejected": "6"}, "chosen"),
        ({"prompt": "2+3?", "chosen": [USER, SIX, USER, FIVE], "rejected": "6"}, "chosen"),
    ],
)
def test_half_of_a_pair_is_named_by_file_line_and_field(tmp_path, row, field):
    write(tmp_path / "train.jsonl", {"prompt": [USER], "chosen": "5", "rejected": "6"}, row)
    task = get_task(str(tmp_path), checker="zero")
    whole, half = read_prompts(task, "train")
    assert task.preference(whole) == ("5", "6")
    with pytest.raises(UserError, match=rf"train.jsonl, line 2: field '{field}' has no completion"):
        task.preference(half)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_tools_and_template_arguments_come_from_columns(tmp_path):
    row = {"prompt": [USER], "answer": "5", "chat_template_kwargs": {"enable_thinking": False}}
    for tools in (TOOLS, json.dumps(TOOLS)):
        write(tmp_path / "train.jsonl", {**row, "tools": tools})
        (prompt,) = read_prompts(get_task(str(tmp_path)), "train")
        assert (prompt.tools, prompt.template_args) == (tuple(TOOLS), {"enable_thinking": False})
    (prompt,) = read_prompts(get_task("dataset", path=str(tmp_path), tools=""), "train")
    assert prompt.tools == ()
    write(tmp_path / "train.jsonl", {"prompt": "2+3?", "answer": "5", "tools": TOOLS})
    with pytest.raises(UserError, match=r"line 1: field 'tools' .*task\.options\.tools"):
        read_prompts(get_task("dataset", path=str(tmp_path), format="text"), "train")


def test_parquet_gives_messages_and_tools_no_keys_that_are_null(tmp_path):
    datasets = pytest.importorskip("datasets")
    other = {"role": "assistant", "content": "6", "tool_calls": None}
    call = {"function": {"name": "sub", "arguments": {"c": 1}}}
    rows = [
        {"messages": [USER, other], "tools": None},
        {"messages": [USER, CALLS], "tools": TOOLS},
        {"messages": [USER, {**CALLS, "tool_calls": [call]}], "tools": TOOLS},
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    task = get_task("dataset", path=str(tmp_path), checker="zero")
    prompts = read_prompts(task, "train")
    assert [len(prompt.tools) for prompt in prompts] == [0, 1, 1]
    worked = [task.demonstration(prompt) for prompt in prompts]
    assert worked == ["6", CALLS, {**CALLS, "tool_calls": [call]}]


PICTURE = [{"type": "image"}, {"type": "text", "text": "2+3?"}]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"videos": ["one.mp4"]}, "column 'videos' has pictures.*only text, and images .*: drop"),
        ({"image_1": {"bytes": "x"}}, "column 'image_1'"),
        ({"scan": {"bytes": "x", "path": None}}, "column 'scan'"),
        ({"prompt": [{"role": "user", "content": PICTURE}]}, "part of type 'image', and no image"),
        ({"prompt": [{"role": "user", "content": PICTURE[1:] * 2}]}, "write it as one text"),
        ({"tools": "add"}, "field 'tools': 'add' is not a list of JSON schemas"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs': .*not an object"),
        ({"prompt": [USER, {**CALLS, "tool_calls": [{}]}]}, "a call needs a function's name"),
        (
            {"prompt": [{**CALLS, "tool_calls": [{"name": "add", "arguments": "2, 3"}]}]},
            "the arguments of tool_calls, 'add', are '2, 3'; give an object",
        ),
        ({"prompt": [FIVE | {"reasoning_content": [1]}]}, "reasoning_content is .*not a text"),
    ],
)
def test_what_no_template_could_be_given_is_refused_by_name(tmp_path, row, message):
    write(tmp_path / "train.jsonl", {"prompt": "2+3?", "answer": "5", **row})
    with pytest.raises(UserError, match=f"train.jsonl, line 1: .*{message}"):
        read_prompts(get_task(str(tmp_path)), "train")


def test_one_part_of_text_and_empty_columns_are_read(tmp_path):
    row = {"prompt": [{"role": "user", "content": PICTURE[1:]}], "answer": "5", "images": []}
    write(tmp_path / "train.jsonl", {**row, "video": None})
    assert read_prompts(get_task(str(tmp_path)), "train")[0].messages == (USER,)
