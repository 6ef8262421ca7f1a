"""A prompts file is refused with the line and what is wrong, before anything is touched."""

from pathlib import Path

import pytest

from tunewright.domain.answers import QualityPrompt
from tunewright.ports import Refused
from tunewright.promptsfile import LOAD, QUALITY, parse_prompts, read_prompts


def test_prompts_with_and_without_answers():
    found = parse_prompts('{"prompt": "2+2=", "answer": "4"}\n\n{"prompt": "hello\\nworld"}\n', "f", QUALITY)
    assert found == (QualityPrompt(prompt="2+2=", answer="4"), QualityPrompt(prompt="hello\nworld"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\nsecret-token', "line 2: is no JSON"),
        ("[" * 20_000, "line 1: is no JSON"),
        ('["a"]', "line 1: an object is wanted"),
        ('{"answer": "a"}', "line 1: prompt must be a text"),
        ('{"prompt": "  "}', "line 1: prompt must be a text"),
        ('{"prompt": 5}', "line 1: prompt must be a text"),
        ('{"prompt": "a", "answer": null}', "line 1: answer must be a text"),
        ('{"prompt": "a", "answer": ""}', "line 1: answer must be a text"),
        ('{"prompt": "a", "anwser": "b"}', "line 1: unknown field `anwser`"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "a"}', "line 3: the same prompt as in line 1"),
        ("".join(f'{{"prompt": "{n}"}}\n' for n in range(1001)), "holds 1001 prompts"),
        ('{"prompt": "' + "a" * QUALITY.size + '"}', "larger than 512 KiB"),
    ],
)
def test_what_is_wrong_is_named_and_never_quoted(text: str, said: str):
    with pytest.raises(Refused, match=r"^f") as refusal:
        parse_prompts(text, "f", QUALITY)
    assert said in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path):
    with pytest.raises(Refused, match=r"^quality\.promptsFile: .*none\.jsonl can't be read: No such file"):
        read_prompts(tmp_path / "none.jsonl", "quality.promptsFile", QUALITY)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match="is not UTF-8"):
        read_prompts(tmp_path / "binary", "load.promptsFile", LOAD)


def test_a_file_to_load_with_may_be_longer(tmp_path: Path):
    text = "".join(f'{{"prompt": "{n}"}}\n' for n in range(1001))
    assert len(parse_prompts(text, "f", LOAD)) == 1001
    (tmp_path / "big").write_text('{"prompt": "' + "a" * QUALITY.size + '"}')
    with pytest.raises(Refused, match="larger than 512 KiB"):
        read_prompts(tmp_path / "big", "f", QUALITY)
    assert len(read_prompts(tmp_path / "big", "f", LOAD)) == 1
