// Package packages makes what a release has, for who releases it: each package is a function over the files that tern and psql
// read, and most have a template. None is edited by hand.
package packages

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
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
	{"sql", plain, false},
	{"citus", citus, false},
	{"extension", extension, true},
	{"pg_tle", pgTLE, false},
}

// All makes every package, each in its directory, from the files of the repository.
func All(repository fs.FS) (Files, error) { return One(repository, "") }

// One makes the package of one directory, or of "" all.
func One(repository fs.FS, dir string) (Files, error) {
	s, err := open(repository)
	if err != nil {
		return nil, err
	}
	all := Files{}
	for _, format := range formats {
		if dir != "" && dir != format.dir {
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
	if len(all) == 0 {
		return nil, fmt.Errorf("there is no package %s", dir)
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

// execute makes files, each of the template of its name, which gets the data.
func (s *source) execute(data any, names ...string) (Files, error) {
	files := Files{}
	for _, name := range names {
		var text bytes.Buffer
		if err := s.templates.ExecuteTemplate(&text, name, data); err != nil {
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

const plainHead = `-- Installs pgratelimit %[1]s, or brings an installed one up to date. It is plain SQL, for one transaction:
--
--   psql "$DATABASE_URL" --single-transaction -v ON_ERROR_STOP=1 -f pgratelimit.sql
--
-- A migration tool runs it as one migration. The role must be the owner of schema ratelimit, or be allowed to create schemas while that
-- is not there. The functions go into the schema that heads search_path, and stay where an earlier install put them.
%[2]s
do $read_only$
begin
  if pg_catalog.current_setting('ratelimit.task', true) operator(pg_catalog.=) '' then
    perform pg_catalog.set_config('default_transaction_read_only', pg_catalog.current_setting('ratelimit.read_only'), false);
  end if;
end;
$read_only$;
`

// plainGuard follows the checks, which fail outside a transaction. The end of the file undoes it.
const plainGuard = `
-- Outside a transaction, a client that goes on after an error would run what follows.
do $read_only$
begin
  if pg_catalog.current_setting('ratelimit.task', true) operator(pg_catalog.=) '' then
    perform pg_catalog.set_config('ratelimit.read_only', pg_catalog.current_setting('default_transaction_read_only'), false),
            pg_catalog.set_config('default_transaction_read_only', 'on', false);
  end if;
end;
$read_only$;
`

// plain makes the scripts of migrations/psql one file each.
func plain(s *source) (Files, error) {
	const dir, begin, commit = "migrations/psql/", "\nbegin transaction isolation level read committed;\n", "\ncommit;\n"
	install, err := fs.ReadFile(s.repository, dir+"install.sql")
	if err != nil {
		return nil, err
	}
	uninstall, err := fs.ReadFile(s.repository, dir+"uninstall.sql")
	if err != nil {
		return nil, err
	}
	_, transaction, _ := strings.Cut(string(install), begin)
	transaction, _, found := strings.Cut(transaction, commit)
	if !found {
		return nil, errors.New("install.sql is no transaction")
	}
	if transaction, err = s.inline(dir, transaction); err != nil {
		return nil, err
	}
	const checked = "\n$prepare$;\n"
	transaction = strings.Replace(transaction, checked, checked+plainGuard, 1)
	removal, err := s.inline(dir, strings.Replace(string(uninstall), "-f "+dir, "-f ", 1))
	return Files{
		"pgratelimit.sql": fmt.Appendf(nil, plainHead, s.Newest().Version, transaction),
		"uninstall.sql":   []byte(removal),
	}, err
}

var ofMigration = regexp.MustCompile(`^([0-9]+)_`)

// inline is a script for psql with the files that it includes, and without what only psql knows.
func (s *source) inline(dir, script string) (string, error) {
	var b strings.Builder
	for line := range strings.Lines(script + "\n") {
		name, includes := strings.CutPrefix(strings.TrimSpace(line), `\ir `)
		switch {
		case includes:
			included, err := fs.ReadFile(s.repository, path.Join(dir, name))
			if err != nil {
				return "", err
			}
			if number := ofMigration.FindStringSubmatch(path.Base(name)); number != nil {
				quoted, err := quote("\n" + string(included))
				if err != nil {
					return "", err
				}
				fmt.Fprintf(&b, "do $migration$\nbegin\n  if (select v.version operator(pg_catalog.<) %s from ratelimit.version as v) then\n    execute %s;\n  end if;\nend;\n$migration$;\n",
					strings.TrimLeft(number[1], "0"), quoted)
			} else {
				b.Write(included)
			}
		case !strings.HasPrefix(line, `\`) && !strings.HasSuffix(line, "\\gset\n"):
			b.WriteString(line)
		}
	}
	return b.String(), nil
}

const unpackaged = "unpackaged" // the version of an extension that was made of an installed schema

// A script is one of the extension, from a version or from none.
type script struct {
	From, To string // From is empty where it installs
	Text     string
}

// Scripts are all scripts of the extension. Each release has one that installs it: PostgreSQL would otherwise look for a way
// from any version that it can install, and might begin with unpackaged.
func (s *source) Scripts() (scripts []script, err error) {
	add := func(from, to, template string, data any) {
		if err != nil {
			return
		}
		var made Files
		made, err = s.execute(data, template)
		scripts = append(scripts, script{from, to, string(made[template]) + "\n"})
	}
	for i, r := range s.Releases {
		add("", r.Version, "create", r)
		if i > 0 {
			add(r.Previous().Version, r.Version, "update", r)
		}
	}
	add("", unpackaged, "adopt", s)
	for _, r := range s.Releases {
		add(unpackaged, r.Version, "adopted", r)
	}
	return scripts, err
}

// Until are the releases up to this one.
func (r *release) Until() []*release { return r.Releases[:r.number+1] }

// Previous is the release before this one.
func (r *release) Previous() *release { return r.Releases[r.number-1] }

// Comment describes the extension.
func (*source) Comment() string { return "token bucket rate limits" }

// extension makes the distribution for PGXN, which is all that make install-extension needs.
func extension(s *source) (Files, error) {
	files, err := s.execute(s, "pgratelimit.control", "META.json", "Makefile")
	if err != nil {
		return nil, err
	}
	scripts, err := s.Scripts()
	if err != nil {
		return nil, err
	}
	for _, script := range scripts {
		name := "pgratelimit--" + script.To + ".sql"
		use := "create extension pgratelimit"
		if script.From != "" {
			name = fmt.Sprintf("pgratelimit--%s--%s.sql", script.From, script.To)
			use = fmt.Sprintf("alter extension pgratelimit update to '%s'", script.To)
		} else if script.To == unpackaged {
			use += " version '" + unpackaged + "'"
		}
		files[name] = fmt.Appendf(nil, "\\echo Use \"%s\" to load this file. \\quit\n%s", use, script.Text)
	}
	for _, name := range []string{"LICENSE", "README.md", "CHANGELOG.md"} {
		if files[name], err = fs.ReadFile(s.repository, name); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// pgTLE makes one file that tells pg_tle all scripts of the extension. They are those of CREATE EXTENSION.
func pgTLE(s *source) (Files, error) { return s.execute(s, "pg_tle.sql") }

// Release writes the files of a release: an archive of each package that is several files, the others as they are,
// and the checksums of all. The same files give the same bytes.
func Release(repository fs.FS) (Files, error) {
	s, err := open(repository)
	if err != nil {
		return nil, err
	}
	name := "pgratelimit-" + s.Newest().Version // of an archive, as PGXN wants it
	all := Files{}
	for _, format := range formats {
		files, err := format.of(s)
		if err != nil {
			return nil, err
		}
		if !format.archive {
			maps.Copy(all, files)
			continue
		}
		if all[name+".zip"], err = archive(name, files); err != nil {
			return nil, err
		}
	}
	var sums bytes.Buffer
	for _, file := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(all[file]), file)
	}
	all["SHA256SUMS"] = sums.Bytes()
	return all, nil
}

// archive makes a zip file with one directory.
func archive(dir string, files Files) ([]byte, error) {
	var zipped bytes.Buffer
	w := zip.NewWriter(&zipped)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		// Without a time of its own, each file has none.
		file, err := w.CreateHeader(&zip.FileHeader{Name: path.Join(dir, name), Method: zip.Deflate})
		if err == nil {
			_, err = file.Write(files[name])
		}
		if err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return zipped.Bytes(), err
}
