"""`python -m flexinfer.cli` is `flexinfer`."""

from flexinfer.cli.main import main

main()
