"""Every test in this folder is marked `peers`, and the marks of the other libraries are known."""

from pathlib import Path

import pytest

MARKS_OF_TRANSFORMERS = (
    "accelerate_tests",
    "all_flash_attn_test",
    "executorch_export_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "generate",
    "is_fsdp_test",
    "is_pipeline_test",
    "is_staging_test",
    "is_tensor_parallel_test",
    "is_training_test",
    "onnx_export_test",
    "torch_compile_test",
    "torch_export_test",
)


def pytest_configure(config: pytest.Config) -> None:
    """Marks that are not registered are errors here."""
    for name in MARKS_OF_TRANSFORMERS:
        config.addinivalue_line("markers", f"{name}: of the suite of transformers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other people's tests may warn: what they warn of is not about us."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.peers)
            item.add_marker(pytest.mark.filterwarnings("default"))
