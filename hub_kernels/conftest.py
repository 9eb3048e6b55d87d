"""The kernels' own tests carry the mark of kernel-builder's continuous integration."""


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: run by kernel-builder on a built kernel")
