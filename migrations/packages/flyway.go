package packages

import (
	"errors"
	"strings"
)

// flyway makes a versioned migration and its undo for each migration. Flyway runs a file in a transaction, and would replace
// what looks like one of its placeholders.
func flyway(s *source) (Files, error) {
	naming := func(kind string) func(step) string {
		return func(s step) string { return kind + strings.Replace(s.name(), "_", "__", 1) }
	}
	files, err := s.export(naming("V"), map[string]string{".sql": "up"})
	if err != nil {
		return nil, err
	}
	if files, err = files.with(s.export(naming("U"), map[string]string{".sql": "down"})); err != nil {
		return nil, err
	}
	for name, text := range files {
		if strings.Contains(string(text), "${") {
			return nil, errors.New(name + " has a placeholder of Flyway")
		}
	}
	return files, nil
}
