"""Table 1 and figures 1 to 5 of BA-BFL out of finished runs.

The same as `bfl-paper show ba_bfl_TABLE` for all scales of which there are runs; `--help` lists tables and figures.
"""

from bfl_bench.commands.paper import run_script

if __name__ == "__main__":
    run_script("ba_bfl")
