"""Figure 1 and tables 1 to 5 of BFL-P out of finished runs.

The same as `python -m bfl_bench.papers.bfl_p`, which is in the wheel too; `--help` lists tables and figures.
"""

from bfl_bench.papers.bfl_p import main

if __name__ == "__main__":
    main()
