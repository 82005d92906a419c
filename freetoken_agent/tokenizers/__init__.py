# SPDX-License-Identifier: Apache-2.0
"""Text to ids and back, from the files that models come with."""
