// Package packages makes everything that pgratelimit is installed from, for who releases it: each package is a function over
// the migrations, and most have a template. None is edited by hand.
package packages

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"github.com/jackc/tern/v2/migrate"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// Files are texts by their paths.
type Files map[string][]byte

// A format is a directory of All. One with an archive is zipped for a release; the others go there as they are.
type format struct {
	dir     string
	make    func(*source) (Files, error)
	archive bool
}

var formats = []format{
	{"psql", psql, false},
	{"citus", citus, false},
	{"extension", extension, true},
	{"pg_tle", pgTLE, false},
	// goose runs each direction, which is one statement to it, in a transaction; so does dbmate.
	{"goose", exported(map[string]string{".sql": "goose"}), true},
	{"dbmate", exported(map[string]string{".sql": "dbmate"}), true},
	// golang-migrate sends a file as one message, which PostgreSQL runs as one transaction; with x-multi-statement it would cut the
	// file at each semicolon.
	{"golang-migrate", exported(map[string]string{".up.sql": "up", ".down.sql": "down"}), true},
	{"flyway", flyway, true},
	// The Supabase CLI knows no way back. It sends the statements one by one, so the file begins its transaction itself.
	{"supabase", exported(map[string]string{".sql": "supabase"}), true},
}

// All makes every package, from the files of the repository.
func All(repository fs.FS) (Files, error) { return some(repository, func(format) bool { return true }) }

// One makes one package of those of All.
func One(repository fs.FS, dir string) (Files, error) {
	files, err := some(repository, func(f format) bool { return f.dir == dir })
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("there is no package %s", dir)
	}
	return files, err
}

// some makes packages, each in its directory.
func some(repository fs.FS, isWanted func(format) bool) (Files, error) {
	s, err := open(repository)
	if err != nil {
		return nil, err
	}
	all := Files{}
	for _, format := range formats {
		if !isWanted(format) {
			continue
		}
		files, err := format.of(s)
		if err != nil {
			return nil, err
		}
		for name, text := range files {
			all[path.Join(format.dir, name)] = text
		}
	}
	return all, nil
}

// of makes the package, and says which one failed.
func (f format) of(s *source) (Files, error) {
	files, err := f.make(s)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.dir, err)
	}
	return files, nil
}

// A source is what packages are made of. Templates get it, or one of its releases or steps.
type source struct {
	Known    []*migrate.Migration // from the oldest to the newest
	Releases []*release           // likewise

	files      fs.FS // of the directory migrations
	repository fs.FS // nil for psql
	templates  *template.Template
}

// A release has a version and the migrations that it brought.
type release struct {
	*source
	number     int // its index in Releases
	Version    string
	Migrations []*migrate.Migration
}

//go:embed *.tmpl
var templates embed.FS

func open(repository fs.FS) (*source, error) {
	files, err := fs.Sub(repository, "migrations")
	if err != nil {
		return nil, err
	}
	s, err := load(files, nil)
	if err != nil {
		return nil, err
	}
	s.repository = repository
	return s, nil
}

func load(files fs.FS, data map[string]any) (*source, error) {
	s := &source{files: files}
	known, err := read(files, data)
	if err != nil {
		return nil, err
	}
	s.Known = known
	s.templates, err = template.New("").Funcs(template.FuncMap{"quote": quote}).ParseFS(templates, "*.tmpl")
	if err == nil {
		s.templates, err = s.templates.ParseFS(files, "prepare.tmpl")
	}
	if err != nil {
		return nil, err
	}
	return s, s.findReleases()
}

// read renders the migrations of a directory.
func read(files fs.FS, data map[string]any) ([]*migrate.Migration, error) {
	migrator, err := migrate.NewMigrator(context.Background(), nil, migrations.VersionTable)
	if err == nil {
		migrator.Data = data
		err = migrator.LoadMigrations(files) // for which it needs no connection
	}
	if err != nil {
		return nil, fmt.Errorf("load migrations: %w", err)
	}
	return migrator.Migrations, nil
}

var versionOf = regexp.MustCompile(`function ratelimit_version\(\)[^$]*\$\$\s*select '([^']+)'`)

// findReleases groups the migrations. The functions of one tell its release; one without functions comes with the next.
func (s *source) findReleases() error {
	var waiting []*migrate.Migration
	for _, m := range s.Known {
		waiting = append(waiting, m)
		found := versionOf.FindStringSubmatch(m.UpSQL)
		if found == nil {
			continue
		}
		if n := len(s.Releases); n > 0 && s.Releases[n-1].Version == found[1] {
			s.Releases[n-1].Migrations = append(s.Releases[n-1].Migrations, waiting...)
		} else {
			s.Releases = append(s.Releases, &release{s, n, found[1], waiting})
		}
		waiting = nil
	}
	if len(waiting) > 0 {
		return errors.New("the newest migration does not install the functions, so it has no version")
	}
	return nil
}

// Newest is the release that is made.
func (s *source) Newest() *release { return s.Releases[len(s.Releases)-1] }

// Backward is Known from the newest to the oldest.
func (s *source) Backward() []*migrate.Migration {
	backward := slices.Clone(s.Known)
	slices.Reverse(backward)
	return backward
}

// Last is the schema version of a release.
func (r *release) Last() int32 { return r.Migrations[len(r.Migrations)-1].Sequence }

// Tables are those that the release creates and that hold data of users, with their schema.
func (r *release) Tables() (names []string) {
	for _, m := range r.Migrations {
		for _, match := range created.FindAllStringSubmatch(m.UpSQL, -1) {
			if match[1] == "table" {
				names = append(names, match[2])
			}
		}
	}
	return names
}

// Names are those of the functions, types and tables that any release creates, by kind; private ones have their schema.
func (s *source) Names() map[string][]string {
	names := map[string][]string{"table": {migrations.VersionTable}} // which prepare creates
	for _, m := range s.Known {
		for _, match := range created.FindAllStringSubmatch(m.UpSQL, -1) {
			kind := strings.Replace(match[1], "procedure", "function", 1)
			names[kind] = append(names[kind], match[2])
		}
		for _, match := range renamed.FindAllStringSubmatch(m.UpSQL, -1) {
			names[match[1]] = append(names[match[1]], match[2]+match[3])
		}
	}
	for kind := range names {
		slices.Sort(names[kind])
		names[kind] = slices.Compact(names[kind])
	}
	return names
}

// Statements of the migrations begin their lines; those of function bodies are indented.
var (
	created = regexp.MustCompile(`(?m)^create (?:or replace |unlogged )?(table|type|function|procedure) ([a-z_.]+)`)
	renamed = regexp.MustCompile(`(?m)^alter (table|type|function) (ratelimit\.)[a-z_]+ rename to ([a-z_]+)`)
)

// A work is what the template prepare is about: an install with its migrations, or an uninstall, which has none.
type work struct {
	*source
	Migrations []*migrate.Migration
}

// execute makes files, each of a template that gets the data; templates are by the names of the files.
func (s *source) execute(data any, templates map[string]string) (Files, error) {
	files := Files{}
	for name, template := range templates {
		var text bytes.Buffer
		if err := s.templates.ExecuteTemplate(&text, template, data); err != nil {
			return nil, err
		}
		files[name] = text.Bytes()
	}
	return files, nil
}

// with adds files, unless there was an error.
func (f Files) with(more Files, err error) (Files, error) {
	maps.Copy(f, more)
	return f, err
}

// quote makes a dollar-quoted literal.
func quote(text string) (string, error) {
	const delimiter = "$pgratelimit$"
	if strings.Contains(text, delimiter) {
		return "", fmt.Errorf("%s stands in what it is to quote", delimiter)
	}
	return delimiter + text + delimiter, nil
}
