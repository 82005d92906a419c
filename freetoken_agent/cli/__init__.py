# SPDX-License-Identifier: Apache-2.0
"""The command line. Each module holds one command or one group of commands."""
