# SPDX-License-Identifier: Apache-2.0
"""`python -m freetoken_agent.cli`, for environments whose scripts folder is not on the path."""

from .main import main

main()
