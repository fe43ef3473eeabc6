"""Gives the doctests in ``tdbridge/`` the settings of the tests, also when run by themselves."""

import tests.conftest  # noqa: F401
