# paceline completion for fish: put this line into ~/.config/fish/config.fish
#   paceline completion fish | source
@lines@
