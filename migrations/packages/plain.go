package packages

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strings"
)

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
