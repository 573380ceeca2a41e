# paceline completion for fish: put this line into ~/.config/fish/config.fish
#   paceline completion fish | source
{% for verb, help in helps.items() %}
complete -c paceline -n __fish_use_subcommand -f -a {{ verb }} -d {{ help | quote }}
{% endfor %}
{% for verb, words in options.items() %}
{% for word in words %}
complete -c paceline -n '__fish_seen_subcommand_from {{ verb }}' -l {{ word[2:] }}
{% endfor %}
{% endfor %}
{% for key in keys %}
complete -c paceline -n 'not __fish_use_subcommand' -a '{{ key }}='
{% endfor %}
