// Package packages makes what a release has, for who releases it: each package is a function over the files that tern and psql
// read, and most have a template. None is edited by hand.
package packages

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
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
	{"sql", plain, false},
	{"citus", citus, false},
	{"extension", extension, true},
	{"pg_tle", pgTLE, false},
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

// A source is what packages are made of. Templates get it, or one of its releases.
type source struct {
	Known    []*migrate.Migration // from the oldest to the newest
	Releases []*release           // likewise

	repository fs.FS
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
	s := &source{repository: repository}
	files, err := fs.Sub(repository, "migrations")
	if err != nil {
		return nil, err
	}
	migrator, err := migrate.NewMigrator(context.Background(), nil, migrations.VersionTable)
	if err == nil {
		err = migrator.LoadMigrations(files) // for which it needs no connection
	}
	if err != nil {
		return nil, fmt.Errorf("load migrations: %w", err)
	}
	s.Known = migrator.Migrations
	s.templates, err = template.New("").Funcs(template.FuncMap{"quote": quote}).ParseFS(templates, "*.tmpl")
	if err != nil {
		return nil, err
	}
	return s, s.findReleases()
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

// Last is the schema version of a release.
func (r *release) Last() int32 { return r.Migrations[len(r.Migrations)-1].Sequence }

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

// quote makes a dollar-quoted literal.
func quote(text string) (string, error) {
	const delimiter = "$pgratelimit$"
	if strings.Contains(text, delimiter) {
		return "", fmt.Errorf("%s stands in what it is to quote", delimiter)
	}
	return delimiter + text + delimiter, nil
}
