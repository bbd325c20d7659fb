"""The work of each command once its arguments are known, one file per command. Owns terminals and files, no
engine parts."""
