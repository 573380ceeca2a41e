#compdef paceline
# paceline completion for zsh: put this line into ~/.zshrc, after compinit
#   eval "$(paceline completion zsh)"
_paceline() {
  local -a verbs options keys
  verbs=(@described@)
  keys=(@keys@)
  if (( CURRENT == 2 )); then
    _describe verb verbs
    return
  fi
  case "$words[2]" in
@cases@
  esac
  if [[ "$PREFIX" == -* ]]; then
    compadd -- $options
  else
    compadd -S '=' -- $keys
    _files
  fi
}
compdef _paceline paceline
