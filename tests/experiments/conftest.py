"""What tests of experiments share."""

import pytest


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray on this machine, which reports nothing and takes the environment of the tests."""
    pytest.importorskip("ray", reason="needs ray: pip install 'whence[ray]'")
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_UV_RUN_RUNTIME_ENV"):
        monkeypatch.setenv(name, "0")
