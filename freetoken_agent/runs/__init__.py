# SPDX-License-Identifier: Apache-2.0
"""What an agent's loop is made of: its calls, its limits, its context rules, its commits."""
