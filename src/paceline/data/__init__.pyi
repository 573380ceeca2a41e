from paceline.data.samples import samples_of as samples_of
