# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""The account finds the padded KDA layer on stock vLLM, with its name and numbers, in time."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.model_loader.reload import (
    accounting,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload.accounting import LoadAccount
from vllm.model_executor.model_loader.reload.budget import Budget, LoadBudgetError

ORDER = [5, 3, 0, 4, 1, 2]
PROJECTION = "model.layers.0.self_attn.in_proj_qkvgfab"


def load_all(rank) -> list[torch.Tensor]:
    """Load every shard; return the sources, which nobody else holds."""
    record_metadata_for_reloading(rank.layer)
    initialize_layerwise_reload(rank.layer)
    sources = rank.sources()
    for _ in rank.load(sources, ORDER):
        pass
    return sources


def held(account: LoadAccount) -> int:
    return account.held.device + account.held.host


@pytest.mark.parametrize(("tp", "rank_id"), [(8, 0), (8, 7), (4, 3), (32, 31)])
@pytest.mark.usefixtures("stock")
def test_stock_is_found_before_finalization(rank_of, tp, rank_id):
    with rank_of(heads=96, tp=tp, rank=rank_id) as rank:
        sources = load_all(rank)
        account = accounting.current()
        (delay,) = account.delays()
        real, total = rank.real_rows, rank.real_rows + rank.padding
        # The layer's own prefix: nobody has told the account a model's names yet.
        assert str(delay).startswith(
            f"{PROJECTION}: weight: {real} of {total} rows arrived; {total - real} rows in no shard"
        )
        assert held(account) == delay.nbytes == sum(source.nbytes for source in sources)
        finalize_layerwise_reload(rank.layer, SimpleNamespace(dtype=torch.bfloat16))
        summary = accounting.last()
        assert [d.missing for d in summary.delays] == [delay.missing]
        assert held(account) == 0


@pytest.mark.usefixtures("stock")
def test_the_bar(rank_of):
    with rank_of(heads=96, tp=8) as rank:
        load_all(rank)
        (delay,) = accounting.current().delays()
        assert "weight: 6284 of 6288 rows arrived; 4 rows in no shard" in str(delay)


@pytest.mark.parametrize("online", [None, "fp8_per_channel_static"])
def test_the_overlay_holds_nothing_afterwards(rank_of, online):
    with rank_of(heads=96, tp=8, online=online) as rank:
        account = accounting.begin()
        sources = load_all(rank)
        account = accounting.current()
        assert held(account) == 0
        assert account.delays() == []
        summary = account.summary()
        assert summary.completed_early == 1
        # Completion happens inside the last call, with all six held.
        peak = max(summary.peak.nbytes, summary.peak_host.nbytes)
        assert peak == sum(source.nbytes for source in sources)


@pytest.mark.usefixtures("stock")
def test_the_guard_stops_stock_and_names_the_layer(rank_of):
    with rank_of(heads=96, tp=8) as rank:
        record_metadata_for_reloading(rank.layer)
        initialize_layerwise_reload(rank.layer)
        sources = rank.sources()
        on_host = sources[0].is_cpu
        limit = sources[5].nbytes + sources[3].nbytes
        accounting.begin(LoadAccount(Budget(limit, on_host, "a test")))
        with pytest.raises(LoadBudgetError) as caught:
            for _ in rank.load(sources, ORDER):
                pass
        # beta and g have arrived: 12 + 1536 rows of 6288.
        assert f"{PROJECTION}  weight: 1548 of 6288 rows" in str(caught.value)
