package packages

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/tern/v2/migrate"
)

// A step is one migration for another tool, which calls it by a number and a name.
type step struct {
	*migrate.Migration
	*source
	From int32 // the schema version before it
}

// Up and Down are what the template prepare is about.
func (s step) Up() work   { return work{s.source, s.Known[:s.Sequence]} }
func (s step) Down() work { return work{s.source, nil} }

// Back is the way back.
func (s step) Back() step { return step{s.Migration, s.source, s.Sequence} }

// Hint says what helps where another version is installed.
func (step) Hint() string {
	return "Where pgratelimit was installed in another way, have your tool mark this migration as applied."
}

// name is what the tools call a migration. They order migrations by the number at the beginning, which most of them want to
// be a time: that of the first release, plus as many seconds as the migration has before it.
func (s step) name() string {
	name := strings.TrimSuffix(s.Name[strings.IndexByte(s.Name, '_')+1:], ".sql")
	return fmt.Sprintf("%d_pgratelimit_%s", 20261122000000+int64(s.Sequence), name)
}

// export makes files of each migration: templates by the end of the file's name, which follows the name that naming gives.
func (s *source) export(naming func(step) string, templates map[string]string) (Files, error) {
	all := Files{}
	for _, m := range s.Known {
		step := step{m, s, m.Sequence - 1}
		names := map[string]string{}
		for end, template := range templates {
			names[naming(step)+end] = template
		}
		files, err := s.execute(step, names)
		if all, err = all.with(files, err); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// exported makes a package of such files under the names of the steps.
func exported(templates map[string]string) func(*source) (Files, error) {
	return func(s *source) (Files, error) { return s.export(step.name, templates) }
}

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
