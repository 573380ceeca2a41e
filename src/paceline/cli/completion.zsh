#compdef paceline
# paceline completion for zsh: put this line into ~/.zshrc, after compinit
#   eval "$(paceline completion zsh)"
_paceline() {
  local -a verbs options keys
  verbs=({% for verb, help in helps.items() %}{{ " " if not loop.first }}{{ (verb ~ ":" ~ help) | quote }}{% endfor %})
  keys=({{ keys | join(" ") }})
  if (( CURRENT == 2 )); then
    _describe verb verbs
    return
  fi
  case "$words[2]" in
{% for verb, words in options.items() %}
    {{ verb }}) options=({{ words | join(" ") }}) ;;
{% endfor %}
  esac
  if [[ "$PREFIX" == -* ]]; then
    compadd -- $options
  else
    compadd -S '=' -- $keys
    _files
  fi
}
compdef _paceline paceline
