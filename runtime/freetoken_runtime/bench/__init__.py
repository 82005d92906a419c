# SPDX-License-Identifier: Apache-2.0
"""Measurements of the engine on the machine at hand. Nothing else imports this package."""
