"""Generation end to end on small models: the texts are the model's own, whatever the batch, stops and guesses."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout.errors import NumericsError, PlanError, UsageError
from flatout.infer.generation.batch_run import Text
from flatout.infer.generation.generated import Piece
from flatout.infer.generation.sampling import Sampling
from flatout.infer.generation.speculation import Guesser
from flatout.infer.generation.stopping import Watch, stops_from
from flatout.infer.generation.token_choice import Choice, TokenRules
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.kernels.native import Native
from flatout.plan import Plan
from tests.infer.generation.tiny import CONTEXT, END, FAMILIES, greedy, model, prompts
from tests.odd_defaults import odd_defaults


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 65 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(65 + token) for token in tokens)


@pytest.fixture(params=["native", "torch"])
def own(request: pytest.FixtureRequest) -> Any:
    """A generator for flatout's own GPT-2, by either engine, with fewer slots than the tests have prompts."""
    if request.param == "torch":
        request.getfixturevalue("_without_a_kernel")
    return TokenGenerator(model("own GPT-2"), slots=3)


@pytest.fixture
def _without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.infer.generation.prepared.native", lambda: Native(library=None, reason="it is a test"))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_the_models_own_text(family: str) -> None:
    network = model(family)
    made = TokenGenerator(network, slots=2).generate(prompts(5), max_new_tokens=12, ignore_end=True)
    assert made.tokens == [greedy(network, prompt, 12) for prompt in prompts(5)]
    assert made.reasons == ["length"] * 5


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_token_for_token_what_transformers_generates(family: str) -> None:
    network = model(family)
    made = TokenGenerator(network).generate(prompts(6), max_new_tokens=40)
    for prompt, tokens, reason in zip(prompts(6), made.tokens, made.reasons, strict=True):
        whole = network.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)
        theirs = whole[0].tolist()[len(prompt) :]
        assert tokens == (theirs[:-1] if reason == "eos" else theirs)
        assert (reason == "eos") == (theirs[-1] == END)


def test_the_order_and_the_company_change_nothing(own: Any) -> None:
    several = own.generate(prompts(7), max_new_tokens=9, temperature=0.9, top_p=0.95, seed=4)
    assert several.seed == 4
    for index in (0, 6):
        again = own.generate(prompts(7)[: index + 1], max_new_tokens=9, temperature=0.9, top_p=0.95, seed=4)
        assert again.tokens[index] == several.tokens[index]
    other = own.generate(prompts(7), max_new_tokens=9, temperature=0.9, top_p=0.95, seed=5)
    assert other.tokens != several.tokens


def test_a_fresh_seed_is_reported_and_gives_the_text_again(own: Any) -> None:
    first = own.generate([[1, 2]], max_new_tokens=8, temperature=1.0)
    assert first.seed is not None
    assert own.generate([[1, 2]], max_new_tokens=8, temperature=1.0, seed=first.seed).tokens == first.tokens
    assert own.generate([[1, 2]], max_new_tokens=8).seed is None


def test_repetition_control_sees_prompt_and_text(own: Any) -> None:
    made = own.generate(prompts(4), max_new_tokens=30, no_repeat_ngram=1)
    for prompt, tokens in zip(prompts(4), made.tokens, strict=True):
        assert len(set(tokens)) == len(tokens)
        assert not set(tokens) & set(prompt)
    punished = own.generate(prompts(4), max_new_tokens=30, repetition_penalty=2.0)
    assert punished.tokens != own.generate(prompts(4), max_new_tokens=30).tokens


def test_stops_end_a_text_and_are_no_part_of_it(own: Any) -> None:
    plain = own.generate([[9, 8, 7]], max_new_tokens=20).tokens[0]
    by_id = own.generate([[9, 8, 7]], max_new_tokens=20, stop=plain[6])
    at = plain.index(plain[6])
    assert (by_id.tokens[0], by_id.reasons[0]) == (plain[:at], "stop")
    token_0 = own.generate([[9, 8, 7]], max_new_tokens=4, stop=0, forced_eos_token_id=0)
    assert (len(token_0.tokens[0]), token_0.reasons) == (3, ["stop"])
    by_run = own.generate([[9, 8, 7]], max_new_tokens=20, stop=[plain[4:7]])
    assert (by_run.tokens[0], by_run.reasons[0]) == (plain[:4], "stop")
    assert by_run.generated_tokens == 7


def test_texts_with_a_tokenizer() -> None:
    generator = TokenGenerator(model("own GPT-2"), tokenizer=Letters())
    made = generator.generate(["HELLO", "A"], max_new_tokens=10)
    assert made.texts is not None
    assert made.texts[0] == Letters().decode(made.tokens[0])
    stop = made.texts[0][3:5]
    cut = generator.generate(["HELLO", "A"], max_new_tokens=10, stop=[stop])
    assert cut.texts is not None
    assert cut.texts[0] == made.texts[0][: made.texts[0].index(stop)]
    pieces = list(generator.stream("HELLO", max_new_tokens=10, stop=[stop]))
    assert "".join(piece.text or "" for piece in pieces) == cut.texts[0]


def test_pieces_are_the_whole(own: Any) -> None:
    whole = own.generate(prompts(5), max_new_tokens=11, stop=[[1, 2], 7])
    pieces: list[Piece] = list(own.stream(prompts(5), max_new_tokens=11, stop=[[1, 2], 7]))
    for index in range(5):
        mine = [piece for piece in pieces if piece.prompt == index]
        assert [token for piece in mine for token in piece.tokens] == whole.tokens[index]
        assert [piece.reason for piece in mine][-1] == whole.reasons[index]
        assert all(piece.reason is None for piece in mine[:-1])


def test_the_context_ends_a_text(own: Any) -> None:
    made = own.generate([[3] * (CONTEXT - 4), [3]], max_new_tokens=10)
    assert [len(tokens) for tokens in made.tokens] == [5, 10]  # nothing reads the last one
    assert made.reasons == ["context", "length"]


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_token_for_token_what_transformers_generates_at_the_end_of_the_context(family: str) -> None:
    network = model(family)
    generator = TokenGenerator(network, slots=2)
    for left in (0, 1, 5):
        prompt = (prompts(1)[0] * CONTEXT)[: CONTEXT - left]
        whole = network.generate(torch.tensor([prompt]), max_new_tokens=left + 1, min_new_tokens=left + 1)
        made = generator.generate([prompt, [3]], max_new_tokens=9, min_new_tokens=9)
        assert made.tokens[0] == whole[0].tolist()[CONTEXT - left :]
        assert (len(made.tokens[0]), made.reasons) == (left + 1, ["context", "length"])


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_guesses_at_the_end_of_the_context(weights: Any, always_guessing: None) -> None:
    network = model("own GPT-2")
    texts = [([7, 8, 9] * CONTEXT)[: CONTEXT - left] for left in (0, 1, 2, 9)]
    plain = TokenGenerator(network, Plan(weights=weights), slots=2).generate(texts, max_new_tokens=20)
    assert [len(tokens) for tokens in plain.tokens] == [1, 2, 3, 10]
    for plan, draft in ((Plan(weights=weights, speculation="lookup"), None), (Plan(weights=weights), network)):
        made = TokenGenerator(network, plan, draft=draft, slots=2).generate(texts, max_new_tokens=20)
        assert (made.tokens, made.reasons) == (plain.tokens, plain.reasons)
        assert made.speculation is not None
        assert made.speculation.proposed > 0


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    generator = TokenGenerator(model("own GPT-2"))
    made = generator.generate([[1, 2]], max_new_tokens=5, temperature=1.0, top_k=20, seed=3)
    for number, whole in ((np.float32, np.int64), (torch.tensor, torch.tensor)):
        given: dict[str, Any] = {"temperature": number(1.0), "top_k": whole(20), "seed": whole(3)}
        again = generator.generate([[1, 2]], max_new_tokens=whole(5), min_new_tokens=whole(0), **given)
        assert again.tokens == made.tokens
        json.dumps(again.to_json())


@pytest.mark.parametrize("repeats", [1, 12])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 20, "seed": 2, "repetition_penalty": 1.1}])
def test_guesses_from_the_text_change_no_token(repeats: int, settings: dict[str, Any], always_guessing: None) -> None:
    texts = [(prompt[:8] * repeats)[:90] for prompt in prompts(4)]
    network = model("own GPT-2")
    plain = TokenGenerator(network, slots=3).generate(texts, max_new_tokens=30, **settings)
    guessed = TokenGenerator(network, Plan(speculation="lookup"), slots=3).generate(
        texts, max_new_tokens=30, **settings
    )
    assert guessed.tokens == plain.tokens
    assert guessed.speculation is not None
    if repeats > 1 and not settings:  # a sampled text seldom comes back to what it said
        assert guessed.speculation.proposed > 0


def test_greedy_text_with_a_draft_is_the_models_own(always_guessing: None) -> None:
    network, draft = model("gpt2"), model("llama")
    plain = TokenGenerator(network, slots=2).generate(prompts(4), max_new_tokens=25)
    for helper in (network, draft):
        guessed = TokenGenerator(network, draft=helper, slots=2).generate(prompts(4), max_new_tokens=25)
        assert guessed.tokens == plain.tokens
    assert guessed.speculation is not None
    assert guessed.speculation.proposed > 0


def test_the_model_as_its_own_draft_is_always_right(always_guessing: None) -> None:
    network = model("own GPT-2")
    made = TokenGenerator(network, draft=network).generate(prompts(3), max_new_tokens=30, temperature=0.8, seed=1)
    assert made.speculation is not None
    assert made.speculation.accepted == made.speculation.proposed > 20


def test_sampling_with_a_draft_has_the_models_distribution(always_guessing: None) -> None:
    """First two tokens of 3,000 texts with and without a draft: chi-square over the commonest pairs."""
    network, draft = model("own GPT-2"), model("own Transformer")
    texts = [[11, 12, 13]] * 1500
    settings: dict[str, Any] = {"temperature": 0.6, "top_k": 4, "max_new_tokens": 3}
    counts = []
    for generator in (TokenGenerator(network, slots=500), TokenGenerator(network, draft=draft, slots=500)):
        tokens = generator.generate(texts, seed=9 + len(counts), **settings).tokens
        found: dict[tuple[int, ...], int] = {}
        for one in tokens:
            found[tuple(one[1:])] = found.get(tuple(one[1:]), 0) + 1
        counts.append(found)
    plain, guessed = counts
    common = [pair for pair in plain if plain[pair] + guessed.get(pair, 0) >= 40]
    square = sum((plain[pair] - guessed.get(pair, 0)) ** 2 / (plain[pair] + guessed.get(pair, 0)) for pair in common)
    assert len(common) >= 4
    assert square < 2.5 * len(common) + 15, "far beyond what chance explains"


@pytest.fixture
def always_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess in every pass: whether it pays depends on time, and tests must not."""
    monkeypatch.setattr("flatout.infer.generation.speculation.Throttle.choose", lambda self: 4)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ([[]], "prompt 0 is empty; a prompt needs at least one token"),
        ([[1], [2] * 129], "prompt 1 has 129 tokens; the model reads prompts of at most 128 tokens; truncate it"),
        ([[1, 211]], "prompt 0 holds token 211 at place 1; the model's ids are 0 to 210"),
        ([[1, -1]], "prompt 0 holds token -1 at place 1"),
        (["text"], "prompt 0 is a text; without a tokenizer a prompt is a list of token ids"),
        ([[1.5]], "prompt 0 is of type list; a prompt is"),
        ([[1, 2.5]], "prompt 0 is of type list; .*; its entry 1 is 2.5, and token ids are whole numbers"),
        ([[True, False]], "prompt 0 is of type list; a prompt is"),
        (torch.ones(1, 3), r"prompt 0 is torch.float32 \[3\]; token ids are whole numbers"),
        ([], "there are no prompts"),
        (7, "the prompts are of type int"),
        (np.array(7), "the prompts are of type ndarray"),
        (b"text", "the prompts are of type bytes"),
        ([b"text"], "prompt 0 is of type bytes"),
        ([None], "prompt 0 is of type NoneType"),
    ],
)
def test_bad_prompts_are_named_before_anything_runs(bad: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        TokenGenerator(model("own GPT-2")).generate(bad)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it is a whole number of at least 1"),
        ({"temprature": 1.0}, "no setting 'temprature'; .* did you mean temperature"),
        ({"eos_token_id": 3}, "no setting 'eos_token_id'; .* pass stop="),
        ({"do_sample": True}, "no setting 'do_sample'; .* pass temperature="),
        ({"max_length": 9}, "no setting 'max_length'; .* pass max_new_tokens="),
        ({"no_repeat_ngram_size": 2}, "did you mean no_repeat_ngram"),
        ({"stop": 3.5}, "stop is 3.5"),
        ({"stop": "text"}, "stop text 'text' without a tokenizer"),
        ({"stop": 500}, "stop token 500"),
        ({"top_p": 1.5, "temperature": 1.0}, "top_p is 1.5"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty is 1e-30; it must be a number of at least 1e-06"),
        ({"attention_mask": [[-10000]]}, "the attention_mask of prompt 0 holds -10000; it is 1 or 0"),
        ({"attention_mask": [["text"]]}, "the attention_mask of prompt 0 holds 'text'"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        TokenGenerator(model("own GPT-2")).generate([[1]], **settings)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("gpt2", "tokenizer is a str without decode; .*from_pretrained"),
        (object(), "tokenizer is a object without encode"),
    ],
)
def test_what_is_no_tokenizer_is_named(given: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        flatout.generate(model("own GPT-2"), ["text"], tokenizer=given)


def test_a_prompt_is_what_users_have() -> None:
    generator = TokenGenerator(model("own GPT-2"))
    expected = generator.generate([[1, 2, 3]], max_new_tokens=4).tokens
    for form in (
        [1, 2, 3],
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        [torch.tensor([1, 2, 3])],
        ((1, 2, 3),),
    ):
        assert generator.generate(form, max_new_tokens=4).tokens == expected


def test_nan_in_the_weights_is_an_error_and_not_a_text(own: Any) -> None:
    broken = model("own GPT-2")
    with torch.no_grad():
        broken.blocks[1].feed_forward.down.weight[3, 3] = float("nan")
    generator = TokenGenerator(broken)
    assert type(generator.engine) is type(own.engine)
    with pytest.raises(NumericsError, match=r"the logits for generated token 0 of prompt [01] are NaN"):
        generator.generate([[1], [2]], max_new_tokens=3)


def test_plans_that_cannot_be_carried_out() -> None:
    network = model("own GPT-2")
    with pytest.raises(PlanError, match="precision is 'fp16'; generation holds weights in fp32, bf16, int8 or int4"):
        TokenGenerator(network, Plan(precision="fp16"))
    with pytest.raises(PlanError, match="the plan's micro_batches is 2; generate does not apply it"):
        TokenGenerator(network, Plan(micro_batches=2))
    with pytest.raises(UsageError, match="slots is 0"):
        TokenGenerator(network, slots=0)


def test_a_draft_of_another_vocabulary() -> None:
    from flatout.models import GPT2, GPT2Config

    small = GPT2(GPT2Config(vocab_size=50, max_tokens=CONTEXT, width=48, heads=3, layers=1))
    with pytest.raises(UsageError, match="the draft's vocabulary has 50 tokens; the model's has 211"):
        TokenGenerator(model("own GPT-2"), draft=small)


def test_a_draft_that_cannot_guess_is_named() -> None:
    from flatout.models import Bert, BertConfig, BertMaskedLM, Seq2SeqConfig, Seq2SeqTransformer

    sizes: dict[str, Any] = {"vocab_size": 211, "max_tokens": 16, "width": 16, "heads": 2}
    pairs = Seq2SeqTransformer(Seq2SeqConfig(**sizes, encoder_layers=1, decoder_layers=1)).eval()
    plain = model("own GPT-2")
    with pytest.raises(PlanError, match=r"^guessing ahead, and the draft is an encoder-decoder; .*; use a draft"):
        TokenGenerator(plain, draft=pairs)
    with pytest.raises(PlanError, match=r"^guessing ahead, and the model is an encoder-decoder; .*; leave out"):
        TokenGenerator(pairs, draft=plain)
    masked = BertMaskedLM(BertConfig(**sizes, layers=1)).eval()
    with pytest.raises(UsageError, match=r"^the draft: the BertMaskedLM is not causal; "):
        TokenGenerator(plain, draft=masked)
    with pytest.raises(UsageError, match=r"^the draft: the model's weights are on meta; .*; move it with model.to"):
        TokenGenerator(plain, draft=model("own GPT-2").to("meta"))
    with pytest.raises(UsageError, match=r"^the draft: the Bert gives a BertOutput "):
        TokenGenerator(plain, draft=Bert(BertConfig(**sizes, layers=1)).eval())


def test_weights_on_no_device_and_whole_number_weights() -> None:
    from flatout.models import GPT2, GPT2Config

    with torch.device("meta"):
        nowhere = GPT2(GPT2Config(vocab_size=50, max_tokens=16, width=48, heads=3, layers=1))
    with pytest.raises(UsageError, match="the model's weights are on meta"):
        TokenGenerator(nowhere)


def test_the_model_is_left_alone() -> None:
    network = model("own GPT-2").train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    flatout.generate(network, [[1, 2]], max_new_tokens=3, plan=Plan(weights="int4"))
    assert network.training
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_figures_and_json(own: Any) -> None:
    made = own.generate(prompts(4), max_new_tokens=6)
    assert made.prompt_tokens == sum(map(len, prompts(4)))
    assert made.generated_tokens == 24
    assert made.tokens_per_second is not None
    assert made.to_json()["tokens_per_second"] == made.tokens_per_second
    assert "24 tokens for 4 prompts" in made.summary()
    assert "1 token for 1 prompt ·" in replace(made, generated_tokens=1, tokens=made.tokens[:1]).summary()
    assert made.decode_share.share is None or made.decode_share.share > 0


@pytest.mark.parametrize("storage", [Plan(), Plan(weights="int8"), Plan(weights="int4")], ids=["fp32", "int8", "int4"])
def test_what_the_user_set_for_new_tensors_changes_nothing(own: Any, storage: Plan) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.9, "seed": 2}
    network, texts = model("own GPT-2"), prompts(3)
    expected = TokenGenerator(network, storage).generate(texts, **settings).tokens
    with odd_defaults():
        generator = TokenGenerator(network, storage)
        assert type(generator.engine) is type(own.engine)
        assert generator.generate(texts, **settings).tokens == expected


def test_rotary_positions_are_computed_in_fp32() -> None:
    network = model("llama")
    expected = TokenGenerator(network).decoder.cosines
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = TokenGenerator(network).decoder.cosines
    finally:
        torch.set_default_dtype(torch.float32)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


def test_inference_mode_and_autocast_around_a_call_do_not_reach_the_next_one(own: Any) -> None:
    expected = own.generate(prompts(4), max_new_tokens=9).tokens
    generator = TokenGenerator(model("own GPT-2"), slots=3)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert generator.generate(prompts(4), max_new_tokens=9).tokens == expected
    assert generator.generate(prompts(4), max_new_tokens=9).tokens == expected


def test_counts_may_be_numpys() -> None:
    generator = TokenGenerator(model("own GPT-2"), slots=np.int64(2))  # type: ignore[arg-type]
    made = generator.generate([[1, 2]], max_new_tokens=np.int64(3))  # type: ignore[arg-type]
    assert len(made.tokens[0]) == 3
    json.dumps(made.to_json())


@pytest.mark.parametrize(("says", "right"), [(3, True), (4, False)])
def test_nan_behind_a_guess_counts_where_the_guess_was_right(says: int, right: bool, always_guessing: None) -> None:
    class Engine:
        device = torch.device("cpu")

        def advance(self, tokens: torch.Tensor, spans: Any, *, every: bool) -> torch.Tensor:
            logits = torch.full((len(tokens), 5), torch.nan)
            logits[0] = torch.arange(5.0) == says
            return logits

    watch = Watch(stops_from(vocabulary=5), limit=9)
    text = Text(index=7, prompt=[1, 2, 3, 1], limit=9, at_limit="length", watch=watch, uniforms=None, made=[2])
    guesser = Guesser(Choice(sampling=Sampling(), rules=TokenRules()), None)
    assert guesser.finds_guesses([text])  # 3, 1, 2 ...
    engine: Any = Engine()
    if right:
        with pytest.raises(NumericsError, match="generated token 2 of prompt 7 are NaN"):
            guesser.advance(engine, [text])
    else:
        assert guesser.advance(engine, [text])[0] == [[4]]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_generator_is_not_copied(copied: Callable[[object], object]) -> None:
    with pytest.raises(UsageError, match=r"a TokenGenerator cannot be copied or pickled; .* copy or pickle the model"):
        copied(TokenGenerator(model("own GPT-2")))
