"""How corpora are made. Everything a script here produces lies under this folder and is git-ignored."""
