"""The `twofold` command. One module per subcommand, imported only when that subcommand is used."""
