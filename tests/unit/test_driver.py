"""Without a driver, the traceback of JAX's CUDA plugin is not logged; every other message of JAX is."""

from __future__ import annotations

import logging

import pytest

from meshpar.mesh import driver, process

FAILED = "Jax plugin configuration error: Exception when calling %s.initialize()"


@pytest.fixture
def num_logged(monkeypatch, caplog):
    """The number of records that a message of JAX leaves in the log, with a driver or without."""

    def num_logged(message: str, *arguments: str, has_driver: bool, platforms: str = "") -> int:
        caplog.clear()
        monkeypatch.setattr(driver, "is_installed", lambda: has_driver)
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        logging.getLogger("jax._src.xla_bridge").error(message, *arguments)
        return len(caplog.records)

    assert process.driver is driver
    return num_logged


@pytest.mark.parametrize("plugin", ["jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"])
def test_a_plugin_without_a_driver_is_no_error(num_logged, plugin):
    assert num_logged(FAILED, plugin, has_driver=False) == 0
    assert num_logged(FAILED, plugin, has_driver=False, platforms="cpu") == 0


def test_control_other_messages_of_jax_are_logged(num_logged):
    assert num_logged(FAILED, "jax_plugins.xla_cuda12", has_driver=True) == 1
    assert num_logged(FAILED, "jax_plugins.xla_cuda12", has_driver=False, platforms="cuda,cpu") == 1
    assert num_logged(FAILED, "jax_plugins.rocm7", has_driver=False) == 1
    assert num_logged("Unable to initialize backend 'cuda'", has_driver=False) == 1


def test_a_driver_is_recognized_by_its_devices_its_folder_or_its_tool(tmp_path, monkeypatch):
    monkeypatch.setattr(driver.shutil, "which", lambda tool: None)
    assert not driver.is_installed(tmp_path)
    for path in ("dev/nvidia0", "proc/driver/nvidia"):
        root = tmp_path / path.partition("/")[0] / "root"
        (root / path).mkdir(parents=True)
        assert driver.is_installed(root)
    monkeypatch.setattr(driver.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    assert driver.is_installed(tmp_path / "nothing")
