# SPDX-License-Identifier: Apache-2.0
"""Oracles and random programs for sessions and reuse; they ship for the tests of users."""
