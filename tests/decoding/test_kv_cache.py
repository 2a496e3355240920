import pytest
import torch

from folio.decoding.kv_cache import KVCache
from model import POSITIONS
from tests.support.decoding import random_model
from tests.support.tolerances import logits_error, within


@pytest.mark.parametrize("count", [1, 3])
@torch.inference_mode()
def test_logits_after_cached_tokens_match_a_full_forward_pass(count, model):
    cache = KVCache(model.config, 3, torch.float32, torch.device("cpu"))
    assert cache.kv.shape == (2, 2, 3, 2, 8, 8)  # (L, 2, B, H, S, D)
    prompts = torch.tensor([[1, 2, 3]] * 3)
    new = prompts[:, :count]
    expected = model.logits(torch.cat([prompts, new], dim=1))[:, -count:]
    model(prompts, kernel=cache)
    error = logits_error(model.config, 3 + count)
    torch.testing.assert_close(model.logits(new, kernel=cache), expected, **within(expected, error))
    assert cache.lengths == [3 + count] * 3 and (cache.kv[..., 3 + count :, :] == 0).all()


@pytest.mark.parametrize("position", POSITIONS)
@torch.inference_mode()
def test_a_cache_with_a_fixed_capacity_computes_the_same(position, seed):
    """With `capacity`, as for CUDA graphs, positions and masks depend only on tensors, also in a full context."""
    model = random_model(seed, position=position)
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    new = torch.tensor([[7], [8]])
    growing, fixed = (KVCache(model.config, 2, torch.float32, torch.device("cpu")) for _ in range(2))
    address = fixed.last.data_ptr()
    for cache in (growing, fixed):
        model(prompts, kernel=cache)
        cache.set_lengths([3, 2])  # the second row forgets its last token
    assert fixed.last.data_ptr() == address  # a captured graph reads this memory
    fixed.capacity = 8
    steps = 12 if model.position_encoding.can_slide else 5
    for _ in range(steps):
        expected = model(new, kernel=growing)[0]
        tolerance = within(expected, logits_error(model.config, 8))
        torch.testing.assert_close(model(new, kernel=fixed)[0], expected, **tolerance)
    assert fixed.lengths == growing.lengths == [3 + steps, 2 + steps]
