"""PyTorch's tests of DCP (test/distributed/checkpoint), each with the tests here that take its place, or why none does.

A test of PyTorch applies when it saves or loads through a StorageWriter or StorageReader that tierd can replace. The
tests here use the same API with TierdWriter and TierdReader, on CPUs with gloo, on 1, 2 and 4 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RELEASE = "2.13"
"""The release of PyTorch that the tests here run with."""

PURE = "uses no storage"
OWN_STORAGE = "tests another storage, not the API of storages"


FURTHER_TESTS = ("test_second_save_of_a_step_is_refused", "test_object_that_one_rank_cannot_write_is_refused_on_all")
"""Tests here of what PyTorch's own storage does otherwise."""


@dataclass(frozen=True, kw_only=True)
class TestFile:
    """`covered`: by test of PyTorch, the tests here. `excluded`: by test of PyTorch, or "all", why none is here."""

    name: str
    covered: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    excluded: dict[str, str] = field(default_factory=dict[str, str])


FILES = (
    TestFile(
        name="test_checkpoint.py",
        covered={
            "test_dummy_writer_works": ("test_sharded_tensors_are_read_in_the_same_parts",),
            "test_dummy_reader_works": ("test_sharded_tensors_are_read_in_the_same_parts",),
            "test_save_error_handling": ("test_failure_of_one_rank_in_a_save_is_raised_on_all",),
            "test_save_error_handling_no_dist": (
                "test_failure_at_a_stage_of_a_save_is_raised_and_the_next_save_succeeds",
            ),
            "test_load_error_handling": ("test_failure_of_one_rank_in_a_load_is_raised_on_all",),
            "test_load_error_handling_no_dist": (
                "test_failure_at_a_stage_of_a_load_is_raised_and_the_next_load_succeeds",
            ),
        },
        excluded={
            "write_data or read_data that raises on one rank": "in tierd these calls exchange with the other ranks",
            "test_tensor_metadata_with_missing_rank_spec": PURE,
            "test_default_metadata": PURE,
        },
    ),
    TestFile(
        name="test_file_system_checkpoint_cpu.py",
        covered={
            "TestDistributedStateDictSaveLoad.test_read_write_only_tensor": (
                "test_tensors_of_a_module_are_read_without_torch_distributed",
            ),
            "TestDistributedStateDictSaveLoadRot13.test_read_write_tensor_and_blob": (
                "test_tensors_and_the_bytes_of_a_stateful_are_read",
            ),
            "TestDistributedStateDictSaveLoadZStandard.test_read_write_only_tensor": (
                "test_tensors_and_the_bytes_of_a_stateful_are_read",
            ),
            "test_read_write_shard_tensor": ("test_sharded_tensors_are_read_in_the_same_parts",),
            "test_load_with_different_shard_plan": (
                "test_sharded_tensors_are_read_in_other_parts",
                "test_sharded_tensor_with_several_parts_on_a_rank_is_refused",
            ),
            "test_load_rowwise_to_colwise": ("test_sharded_tensor_of_rows_is_read_as_columns",),
            "test_save_load_bytes": ("test_objects_are_read_on_all_ranks",),
            "test_switch_between_sharded_tensor_to_tensor": (
                "test_sharded_tensor_is_read_as_a_whole_one_and_the_reverse",
            ),
        },
        excluded={
            "saves with several parts of a tensor on one rank": "refused by name: a shard holds one part of a tensor",
            "thread_count, Rot13 and ZStandard": "options of FileSystemWriter",
            "test_dtype_mismatch_casting": "its option allow_unsafe_types is not in the release",
        },
    ),
    TestFile(
        name="test_file_system_checkpoint.py",
        excluded={"all": "the tests of test_file_system_checkpoint_cpu.py on GPUs"},
    ),
    TestFile(
        name="test_dtensor_checkpoint.py",
        covered={"test_distributed_tensor_planner": ("test_dtensors_and_extra_state_are_read",)},
    ),
    TestFile(
        name="test_dtensor_resharding.py",
        covered=dict.fromkeys(
            (
                "test_1d_to_1d_reshard_placement_change",
                "test_2d_to_2d_reshard_placement_change",
                "test_1d_to_2d_reshard_mesh_change",
                "test_2d_to_1d_reshard_mesh_change",
            ),
            ("test_dtensor_is_read_with_another_placement_or_mesh",),
        ),
    ),
    TestFile(
        name="test_fsdp_model_state.py",
        covered={
            "test_fsdp_model_state_no_resharding": ("test_fsdp_model_is_read_by_the_same_ranks",),
            "test_fsdp_model_state_with_resharding": ("test_fsdp_model_is_read_with_another_sharding",),
        },
    ),
    TestFile(
        name="test_fsdp_optim_state.py",
        covered={"test_load_sharded_optimizer_state_dict": ("test_sharded_state_of_an_fsdp_optimizer_is_read",)},
    ),
    TestFile(
        name="test_hsdp_checkpoint.py",
        covered={
            "test_hsdp_checkpoint": ("test_hsdp_model_is_read",),
            "test_hsdp_fsdp_checkpoint_conversion": ("test_hsdp_model_is_read_by_fsdp",),
        },
    ),
    TestFile(
        name="test_tp_checkpoint.py",
        covered={
            "test_tp_checkpoint": ("test_tensor_parallel_model_is_read",),
            "test_tp_checkpoint_load_on_meta_device": ("test_tensor_parallel_model_is_read_into_meta_tensors",),
        },
    ),
    TestFile(
        name="test_fsdp_tp_checkpoint_conversion.py",
        covered={"test_fsdp_to_tp": ("test_fsdp_model_is_read_by_a_tensor_parallel_one",)},
    ),
    TestFile(
        name="test_planner.py",
        covered={
            "test_strict": ("test_missing_key_is_refused_unless_the_planner_allows_it",),
            "test_load_different_sizes_throws": ("test_tensor_of_another_size_is_refused",),
            "test_version_key_in_planner_data": ("test_metadata_has_the_version_of_dcp",),
        },
        excluded={"TestSavePlan, TestPlannerHelpers, TestValidateGlobalPlan": PURE},
    ),
    TestFile(
        name="test_compatibility.py",
        covered={"test_storage_meta": ("test_storage_meta_names_the_checkpoint_the_save_and_the_load",)},
        excluded={"test_metadata": PURE, "test_sharded_tensor_dependency": "reads pickled metadata of old checkpoints"},
    ),
    TestFile(
        name="test_format_utils.py",
        covered={
            "test_online_torch_save_to_dcp": ("test_torch_save_checkpoint_is_loaded_by_dcp_and_saved_to_tierd",),
        },
        excluded={
            "test_dcp_to_torch_save, test_torch_save_to_dcp": "convert folders of DCP's own files: see `tierd export`"
        },
    ),
    TestFile(
        name="test_save_load_api.py",
        excluded={"test_auto_detect": "a path selects one of DCP's own storages; tierd's need a client"},
    ),
    TestFile(
        name="test_async_process_executor.py",
        excluded={"all": "saving from another process is refused: it has no connection to the daemon"},
    ),
    TestFile(
        name="e2e/test_e2e_save_and_load.py",
        covered={
            "test_e2e": ("test_training_continues_equal_after_a_load",),
            "test_e2e_async_cached": ("test_async_save_in_a_thread_with_a_stager_of_its_own",),
            "test_stateful_and_non_stateful_loads": ("test_statefuls_are_loaded_in_place_and_dicts_are_replaced",),
            "test_no_dist": ("test_empty_state_is_saved_and_loaded",),
            "test_partial_load": (
                "test_model_alone_is_read_from_a_checkpoint_with_optimizer",
                "test_keys_alone_load_a_part_of_the_checkpoint",
            ),
            "test_different_ordered_state_dict_keys": ("test_keys_may_have_another_order_on_each_rank",),
            "test_init_state_dict": ("test_state_dicts_of_model_and_optimizer_are_loaded_in_place",),
        },
        excluded={
            "test_e2e_async_cached with PROCESS": "refused by name: that process has no connection to the daemon",
            "test_e2e with torch.compile": "the same state under other names: see the exactness table",
            "test_overwrite": "a second save of a step is refused by name: tierd never overwrites a checkpoint",
            "io.BytesIO as a value": "refused by name: bytes are stored",
            "test_no_cpu": PURE,
        },
    ),
    TestFile(
        name="e2e/test_fine_tuning.py",
        covered={"test_fine_tuning": ("test_fine_tuned_part_is_saved_and_read_alone",)},
    ),
    TestFile(
        name="e2e/test_fsdp_ep.py",
        excluded={"all": "needs GPUs; DTensors of several meshes are in the exactness table"},
    ),
    *(
        TestFile(name=name, excluded={"all": PURE})
        for name in (
            "test_dedup_tensors.py",
            "test_nested_dict.py",
            "test_traverse.py",
            "test_utils.py",
            "test_state_dict.py",
            "test_state_dict_utils.py",
            "test_state_dict_stager.py",
            "test_pg_transport.py",
        )
    ),
    *(
        TestFile(name=name, excluded={"all": OWN_STORAGE})
        for name in (
            "test_fsspec.py",
            "test_hf_storage.py",
            "test_hf_safetensor_e2e.py",
            "test_quantized_hf_storage.py",
            "test_consolidate_hf_safetensors.py",
            "_experimental/",
        )
    ),
)
