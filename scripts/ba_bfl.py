"""Table 1 and figures 1 to 5 of BA-BFL out of finished runs.

The same as `python -m bfl_bench.papers.ba_bfl`, which is in the wheel too; `--help` lists tables and figures.
"""

from bfl_bench.papers.ba_bfl import main

if __name__ == "__main__":
    main()
