# paceline completion for bash: put this line into ~/.bashrc
#   eval "$(paceline completion bash)"
_paceline() {
  local word="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}" options=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {{ helps | join(" ") | quote }} -- "$word"))
    return
  fi
  case "$verb" in
{% for verb, words in options.items() %}
    {{ verb }}) options={{ words | join(" ") | quote }} ;;
{% endfor %}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *.*) COMPREPLY=($(compgen -S = -W {{ keys | join(" ") | quote }} -- "$word") $(compgen -f -- "$word")); compopt -o nospace ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}
complete -o filenames -F _paceline paceline
