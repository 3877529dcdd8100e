"""Faults that draft-and-verify and its caches have had in public, with the tests that would find them.

``A`` is losslessness, ``B`` caches, batches and masks. The table names the tests, and a test of the table
holds it to the files; what no other file covers is below it.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drive import device_session, opening, picture_of

from ciar.cloud.sessions import Cloud
from ciar.decoding.strategy import Pass, all_strategies, get_strategy
from ciar.models.bundle import Bundle, load_bundle
from ciar.pipeline import Pipeline
from ciar.transport.base import Connection
from ciar.transport.inprocess import InProcessTransport

HERE = Path(__file__).parent
#: Fault -> where it was met in public and what it is; tests, as file and function.
TABLE: dict[str, tuple[str, tuple[str, ...]]] = {
    "A1": (
        "huggingface/transformers#32867: drafts by arg-max, judged by a soft law",
        (
            "decoding/test_strategy_laws.py test_speculative_is_exact",
            "decoding/test_strategy_laws.py test_fault_greedy_drafts_with_a_soft_law",
            "decoding/test_exactness.py test_fault_greedy_drafts_with_a_soft_law",
        ),
    ),
    "A2": (
        "huggingface/transformers#47932: the drafter's law before temperature and top-k",
        (
            "decoding/test_strategy_laws.py test_fault_raw_law_of_the_device",
            "decoding/test_exactness.py test_fault_raw_law_of_the_device",
            "decoding/test_exchange.py test_fault_the_chance_of_another_law",
            "decoding/test_batch.py test_fault_raw_device_law",
            "protocol/test_codec.py test_chances_that_are_refused",
            "protocol/test_codec.py test_laws_that_are_refused",
        ),
    ),
    "A3": (
        "vllm-project/vllm#41834: NaN becomes token 0",
        (
            "decoding/test_sampling.py test_nan_is_never_a_token",
            "protocol/test_codec.py test_chances_that_are_refused",
            "cloud/test_sessions.py test_nan_in_the_cloud_ends_the_session",
            "cloud/test_sessions.py test_nan_in_the_device_copy_ends_the_session",
            "decoding/test_feature_rows.py test_damaged_features_are_refused",
        ),
    ),
    "A4": (
        "gpt-fast, litgpt, LANTERN: a residual without mass",
        (
            "decoding/test_sampling.py test_residual_of_zero_mass_is_the_law_itself",
            "decoding/test_acceptance.py test_a_residual_without_mass_is_p",
            "decoding/test_acceptance.py test_lantern_never_redraws_from_nothing",
        ),
    ),
    "A6": (
        "vllm-project/vllm#6038: requests share random state",
        (
            "test_pipeline.py test_seeds_in_any_order",
            "cloud/test_sessions.py test_sessions_in_turn_equal_sessions_alone",
            "decoding/test_batch.py test_mates_order_and_number_do_not_matter",
            "decoding/test_strategy_laws.py test_fault_shared_noise",
            "decoding/test_trees.py test_fault_one_chance_for_all_siblings",
        ),
    ),
    "A7": (
        "vllm-project/vllm#22987: speculation changes greedy output",
        (
            "test_known_faults.py test_greedy_pictures_are_those_of_plain_ar",
            "test_known_faults.py test_in_bfloat16_pictures_part_at_near_ties_alone",
        ),
    ),
    "A8": (
        "SafeAILab/EAGLE#75: greedy trees unlike the base model, other stop rules",
        (
            "test_known_faults.py test_greedy_pictures_are_those_of_plain_ar",
            "decoding/test_trees.py test_eagle2_gives_the_pictures_of_base",
            "decoding/test_eagle.py test_eagle2_is_base_in_fewer_passes",
        ),
    ),
    "A10": (
        "meta-pytorch/gpt-fast#219: a verify path that nothing ran",
        (
            "models/test_inference.py test_any_blocks_give_the_logits_of_one_pass",
            "decoding/test_every_strategy.py test_a_picture_over_the_wire",
            "decoding/test_every_strategy.py test_a_batch_gives_the_pictures_of_the_wire",
            "decoding/test_batch.py test_ragged_blocks_equal_single_ones",
            "decoding/test_eagle.py test_a_tree_is_judged_as_its_paths_are",
        ),
    ),
    "A11": (
        "huggingface/transformers#35099: drafter and target on different devices",
        ("test_known_faults.py test_device_and_cloud_may_compute_in_other_places_and_types",),
    ),
    "A13": (
        "bigscience-workshop/petals: the correction after a partial match is lost",
        (
            "decoding/test_strategy_laws.py test_tokens_of_a_round",
            "decoding/test_verify.py test_a_sweep_gets_one_token_further_than_the_guesses_were_right",
            "decoding/test_trees.py test_a_drafter_that_is_right_moves_on_by_its_depth_and_one",
        ),
    ),
    "A14": (
        "ggml-org/llama.cpp#25818: acceptance counts kept rounds alone",
        (
            "decoding/test_strategy_laws.py test_acceptance_at_the_first_position_counts_every_round",
            "decoding/test_verify.py test_acceptance_counts_every_round",
            "decoding/test_exchange.py test_every_drafted_token_is_accounted_for",
            "decoding/test_trees.py test_what_a_split_tree_says_of_itself",
            "decoding/test_every_strategy.py test_a_batch_gives_the_pictures_of_the_wire",
        ),
    ),
    "B1": (
        "huggingface/transformers#30670: output depends on batch mates, on a slot's last user",
        (
            "cloud/test_engine.py test_sessions_do_not_disturb_each_other",
            "cloud/test_engine.py test_a_rollback_reads_no_stale_cell",
            "cloud/test_sessions.py test_sessions_in_turn_equal_sessions_alone",
            "decoding/test_batch.py test_mates_order_and_number_do_not_matter",
        ),
    ),
    "B2": (
        "huggingface/transformers#22861: padding leaks",
        (
            "cloud/test_engine.py test_negative_prompt_of_another_length",
            "decoding/test_batch.py test_each_picture_equals_its_lone_run",
            "decoding/test_batch_families.py test_each_picture_equals_its_lone_run",
        ),
    ),
    "B3": (
        "unslothai/unsloth#9708: a row that is masked whole becomes NaN",
        (
            "models/test_gpt.py test_a_row_of_padding_stays_finite",
            "models/test_text.py test_empty_prompts_are_refused",
        ),
    ),
    "B5": (
        "vllm-project/vllm-omni#1791: half of the state moves, guidance is off",
        (
            "cloud/test_sessions.py test_a_history_is_taken_up_at_every_cut",
            "decoding/test_every_strategy.py test_a_picture_can_be_taken_up_again",
            "decoding/test_eagle.py test_features_that_fill_several_frames",
        ),
    ),
    "B6": (
        "FoundationVision/LlamaGen#77: guidance 0, temperature 0, guidance below 1",
        (
            "cloud/test_engine.py test_guidance_against_the_null_caption",
            "test_pipeline.py test_temperature_0_ignores_the_seed",
        ),
    ),
    "B7": (
        "deepseek-ai/Janus#129: memory grows with the number of pictures",
        (
            "test_known_faults.py test_many_pictures_need_the_memory_of_one",
            "test_quality.py test_picture_i_is_the_lone_picture_of_seed_plus_i",
        ),
    ),
}


@pytest.mark.parametrize("fault", TABLE)
def test_every_fault_has_tests_that_are_there(fault: str) -> None:
    story, tests = TABLE[fault]
    assert story
    assert tests
    for test in tests:
        file, name = test.split()
        tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"


EXACT = [one.name for one in all_strategies() if one.exact and one.uses_cloud and one.name != "base"]
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("name", EXACT)
def test_greedy_pictures_are_those_of_plain_ar(
    tiny_bundle: Bundle, tiny_cloud: Cloud, name: str, window: int
) -> None:
    """Token for token, in float32 on a processor, and exactly as many tokens as the picture has."""
    wire = InProcessTransport(tiny_cloud)
    own = {option.name for option in get_strategy(name).options}
    shape = {"depth": min(window, 4), "branch": window}
    options = tuple((key, value) for key, value in shape.items() if key in own)
    for prompt in ("a red cat", "smiling dog sunglasses", "sun"):
        base = picture_of(tiny_cloud, opening(prompt, "base", **GREEDY))[0]
        message = opening(prompt, name, window=window, options=options, **GREEDY)
        made = device_session(tiny_bundle, wire, message).run()
        assert made.tokens == base
        assert len(made.tokens) == len(made.ledger.decided) == 16


@pytest.mark.parametrize("name", ["lossless", "scd", "eagle2"])
def test_in_bfloat16_pictures_part_at_near_ties_alone(tiny_folder: Path, name: str) -> None:
    """Blocks of other sizes round otherwise: where pictures part, the two best logits are within it."""
    bundle = load_bundle(tiny_folder, dtype="bfloat16")
    cloud = Cloud(bundle)
    wire = InProcessTransport(cloud)
    for prompt in ("a red cat", "smiling dog sunglasses", "sun"):
        base, session = picture_of(cloud, opening(prompt, "base", **GREEDY))
        made = device_session(bundle, wire, opening(prompt, name, window=4, **GREEDY)).run().tokens
        part = next((i for i, (a, b) in enumerate(zip(base, made, strict=True)) if a != b), None)
        if part is None:
            continue
        text = bundle.text.encode(prompt)
        slot = cloud.engine.open(text, None, session._run.settings.guidance, text)
        logits = cloud.engine.run(slot, Pass(0, base[:part]))[-1]
        best = logits.topk(2).values
        assert float(best[0] - best[1]) <= 16 * torch.finfo(torch.bfloat16).eps * float(logits.abs().max())


PLACES = [
    pytest.param("cpu", "bfloat16", id="bfloat16"),
    pytest.param(
        "cuda",
        "float32",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
    ),
]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("name", ["ciar", "speculative", "dssd", "eagle2"])
def test_device_and_cloud_may_compute_in_other_places_and_types(
    tiny_bundle: Bundle, tiny_folder: Path, name: str, device: str, dtype: str
) -> None:
    """Messages are numbers and bytes; a device half in float32 on a processor takes any cloud's."""
    wire = InProcessTransport(Cloud(load_bundle(tiny_folder, device, dtype)))
    options = (("placement", "split"),) if name == "eagle2" else ()
    message = opening("a red cat", name, seed=3, window=4, options=options)
    result = device_session(tiny_bundle, wire, message, threshold=0.9).run()
    assert len(result.tokens) == 16
    assert all(type(token) is int for token in result.tokens)


def test_many_pictures_need_the_memory_of_one(tiny_bundle: Bundle) -> None:
    """One session is open at a time, however many pictures are asked for; seeds are as if done at once."""
    open_now: list[int] = []
    most = 0

    class Counting(InProcessTransport):
        def connect(self) -> Connection:
            nonlocal most
            connection = super().connect()
            open_now.append(1)
            most = max(most, len(open_now))
            close = connection.close

            def closing() -> None:
                if open_now:
                    open_now.pop()
                close()

            connection.close = closing  # type: ignore[method-assign]
            return connection

    pipe = Pipeline(tiny_bundle, transport=Counting(Cloud(tiny_bundle)))
    many = pipe("a red cat", num_images_per_prompt=16, seed=4, strategy="scd", output_type="tokens").tokens
    assert most == 1
    assert len(many) == 16
    few = pipe("a red cat", num_images_per_prompt=4, seed=4, strategy="scd", output_type="tokens").tokens
    np.testing.assert_array_equal(many[:4], few)
