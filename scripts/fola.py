"""Table II and figures 2 to 12 of FOLA out of finished runs.

The same as `python -m bfl_bench.papers.fola`, which is in the wheel too; `--help` lists tables and figures.
"""

from bfl_bench.papers.fola import main

if __name__ == "__main__":
    main()
