"""Credentials are taken out of what is shown, and nothing else is."""

import pytest

from tunewright.domain.redact import redact, redact_all

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"http://user:{SECRET}@host/path",
        f"vllm serve m --api-key {SECRET} --port 1",
        f"--api-key={SECRET}",
        f"--hf-token '{SECRET}'",
        f"HF_TOKEN={SECRET}",
        f"token: {SECRET}",
        f'{{"api_key": "{SECRET}"}}',
        f"password={SECRET}, more",
        f"Authorization: Bearer {SECRET}",
    ],
)
def test_credentials_are_hidden(text: str) -> None:
    assert SECRET not in redact(text)
    assert "(hidden)" in redact(text)
    assert SECRET not in str(redact_all({"a": [text, {text: text}]}))


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens: 8192",
        "1,234 output tokens/s (one run, simulated)",
        "http://host:8000/metrics",
        "TTFT p95 210 ms against 250 ms",
        "b00fa1f18f",
        "promptTokens=300",
    ],
)
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


def test_the_word_after_a_secret_flag_is_hidden() -> None:
    assert redact_all(["serve", "--api-key", SECRET, "--port", "1"]) == [
        "serve",
        "--api-key",
        "(hidden)",
        "--port",
        "1",
    ]


def test_numbers_and_nothing_stay() -> None:
    assert redact_all({"a": 1, "b": None, "c": [True, 0.5]}) == {"a": 1, "b": None, "c": [True, 0.5]}
