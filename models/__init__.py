"""Declared models: ordinary NumPyro functions, each of which runs under every method and under
plain NUTS as it stands.
"""
