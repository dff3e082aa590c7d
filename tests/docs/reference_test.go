package docs

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// docs/reference.md is made of the catalog below this line. What stands above it is written by hand.
const referenceBegins = "<!-- make reference writes what follows, from the comments of the functions in sql/ -->\n"

// A referenceGroup is a part of sql/install.sql that has public functions, or the types.
type referenceGroup struct {
	title string
	names []string
}

func referenceGroups(t *testing.T, db *pgtest.DB) (groups []referenceGroup) {
	read := func(name string) string { return string(kit.NoError(os.ReadFile("../../sql/" + name))(t)) }
	for _, part := range regexp.MustCompile(`(?m)^-- (.*)\.\n((?:\{\{.*\n)+)`).FindAllStringSubmatch(read("install.sql"), -1) {
		group := referenceGroup{title: part[1]}
		for _, file := range regexp.MustCompile(`"(.*)"`).FindAllStringSubmatch(part[2], -1) {
			for _, function := range regexp.MustCompile(`(?m)^create or replace (?:function|procedure) (ratelimit_\w+)`).FindAllStringSubmatch(read(file[1]), -1) {
				group.names = append(group.names, function[1])
			}
		}
		if group.names != nil {
			groups = append(groups, group)
		}
	}
	types := kit.Column(t, db, "select distinct format_type(prorettype, null) from "+kit.PackageFunctions+" as p where not private and prorettype::regtype::text ~ '^ratelimit' order by 1")
	return append(groups, referenceGroup{"Types", types})
}

// The cost of a function, with the lines of tests/bench/instructions.md in braces. Without an entry it is that of the line of its name.
var referenceCosts = map[string]string{
	"acquire":     "a grant {acquire}, a denial {denied}, a grant with an idempotency key {keyed}, a replay {replayed}, the first grant of a key {created}",
	"acquire_all": "a grant of three buckets {joint}, a denial {joint-denied}, a grant with an idempotency key {joint-keyed}",
	"acquire_many": "each of 32 requests {batch-32}, of 128 {batch-128}, of 128 for one bucket {hot-128}, of 32 with idempotency keys {keyed-32}, " +
		"of 32 denials {denied-32}, of 32 requests of three buckets {joint-many-32}",
	"acquire_packed": "each of 32 requests {packed-32}, of 128 {packed-128}, of 128 for one bucket {packed-hot-128}, " +
		"of 32 with idempotency keys {packed-keyed-32}, of 32 denials {packed-denied-32}, of 32 requests of three buckets {joint-32}",
	"acquire_up_to": "a grant {up-to}",
	"charge":        "a charge {charged}",
	"enforce":       "a grant {enforced}",
	"guard":         "an insert of one row {guarded}, each row of an insert of 32 keys {guarded-32}",
	"http_fields":   "a call {http-fields}",
	"hold":          "a grant beside 5 holders {held}, beside 1,000 {held-of-1000}, a denial {held-denied}",
	"release":       "a grant and its release {held-released}",
	"renew":         "a renewal {renewed}",
	"reserve":       "a grant without a wait {reserved}, a grant with a wait {waiting}",
	"settle":        "a grant with an idempotency key and its settlement {keyed-settled}",
	"settle_all":    "a grant of three buckets with an idempotency key and its settlement {joint-settled}",
}

// A referenceField is an argument or a column, by its place; of a function without any it is empty. Type is "bigint = 1" if 1 is the default.
type referenceField struct {
	Of, Returns, Comment, Kind, Name, Type string
	Place                                  int
}

const referenceQuery = `
	with functions as (select p.* from ` + kit.PackageFunctions + ` as p where not private)
	select p.proname::text as of, case when p.prorettype not in ('void'::regtype, 'record'::regtype, 'trigger'::regtype) then format_type(p.prorettype, null) else '' end as returns,
	       obj_description(p.oid, 'pg_proc') as comment,
	       case when a.mode in ('o', 't') then 'column' when a.name is not null then 'argument' else '' end as kind, coalesce(a.name, '') as name,
	       concat_ws(' = ', format_type(a.type, null), lower(regexp_replace(pg_get_function_arg_default(p.oid, a.place::integer), '::[a-z\[\] ]+$', ''))) as type,
	       coalesce(a.place, 0) as place
	  from functions as p
	  left join unnest(p.proargnames, p.proargmodes, coalesce(p.proallargtypes, p.proargtypes::oid[])) with ordinality as a (name, mode, type, place) on true
	union all
	select format_type(t.oid, null), '', obj_description(t.oid, 'pg_type'), 'column', c.attname, format_type(c.atttypid, null), c.attnum
	  from pg_type as t
	  join pg_attribute as c on c.attrelid = t.typrelid
	 where t.typnamespace = 'ratelimit'::regnamespace
	   and t.oid in (select prorettype from functions)
	 order by "of", place`

var (
	referenceName = regexp.MustCompile(`\bratelimit[_.]\w+`)
	referenceFact = regexp.MustCompile(`(?m)^(\w+|Locks and writes): (.*)$`)
	referenceCell = regexp.MustCompile(`\{[^}]*\}`)
	referenceCost = regexp.MustCompile(`(?m)^\| (\S+) \| (\d+) \| (\S+) \| (\d+) \|`)
)

func TestDocs_ReferenceIsGenerated(t *testing.T) {
	t.Parallel()
	text := kit.NoError(os.ReadFile("../../docs/reference.md"))(t)
	byHand, _, found := strings.Cut(string(text), referenceBegins)
	require.True(t, found, "docs/reference.md has no line %s", referenceBegins)
	page := byHand + referenceBegins + reference(t)
	if os.Getenv("RATELIMIT_REFERENCE") == "write" {
		require.NoError(t, os.WriteFile("../../docs/reference.md", []byte(page), 0o644))
	} else if page != string(text) {
		t.Fatal("docs/reference.md is out of date: make reference")
	}
}

// reference is the generated part of the page.
func reference(t *testing.T) string {
	db := pgtest.New(t)
	rows := kit.NoError(db.Pool.Query(t.Context(), referenceQuery))(t)
	fields := kit.NoError(pgx.CollectRows(rows, pgx.RowToStructByName[referenceField]))(t)
	sections := map[string][]referenceField{}
	for _, field := range fields {
		field.Comment = referenceName.ReplaceAllString(strings.ReplaceAll(field.Comment, "\n  ", " "), "`$0`")
		sections[field.Of] = append(sections[field.Of], field)
	}
	record := kit.NoError(os.ReadFile("../../tests/bench/instructions.md"))(t)
	counts, writes := map[string]float64{}, map[string]string{}
	for _, line := range referenceCost.FindAllStringSubmatch(string(record), -1) {
		cell := "{" + line[1] + "}"
		counts[cell] = kit.NoError(strconv.ParseFloat(line[2], 64))(t)
		if line[3] != "0" {
			writes[cell] = strings.Replace(fmt.Sprintf(" (%s ids, %s B)", line[3], line[4]), "(1 ids", "(1 id", 1)
		}
	}

	var contents, body strings.Builder
	decision, rights := sections["ratelimit.decision"][0].Comment, referenceRights(t, db)
	for _, group := range referenceGroups(t, db) {
		fmt.Fprintf(&body, "\n## %s\n", group.title)
		var links []string
		for _, full := range group.names {
			name := strings.TrimLeft(strings.TrimPrefix(full, "ratelimit"), "_.")
			require.Contains(t, sections, full)
			links = append(links, fmt.Sprintf("[%s](#%s)", name, strings.ReplaceAll(full, ".", "")))
			fmt.Fprintf(&body, "\n### %s\n\n", full)
			var section strings.Builder
			referenceSection(&section, sections[full], decision)
			body.WriteString(strings.TrimSuffix(section.String(), "\n") + rights[full] + "\n")
			delete(sections, full)
			cost := referenceCosts[name]
			if cell := "{" + name + "}"; cost == "" && counts[cell] > 0 {
				cost = "a call " + cell
			}
			if cost != "" && rights[full] != "" { // of a function, and not of the type of that name
				fmt.Fprintf(&body, "- **Cost**: %s.\n", referenceCell.ReplaceAllStringFunc(cost, func(cell string) string {
					require.Contains(t, counts, cell)
					return fmt.Sprintf("%.2g", counts[cell]/counts["{acquire}"]) + writes[cell]
				}))
			}
		}
		fmt.Fprintf(&contents, "\n- %s: %s", group.title, strings.Join(links, " · "))
	}
	require.Empty(t, sections, "they are in no part of sql/install.sql")
	return contents.String() + "\n" + body.String()
}

// A referenceBody is a function, and what its text names: tables that it may read or write, and functions of the package.
type referenceBody struct {
	Name, Source, Path string
	Private, Definer   bool
}

var (
	referenceRead  = regexp.MustCompile(`\b(?:from|join|table)\s+(?:ratelimit\.)?(\w+)`)
	referenceWrite = regexp.MustCompile(`\b(?:insert into|update|delete from)\s+(?:ratelimit\.)?(\w+)`)
	referenceCall  = regexp.MustCompile(`\b(\w+)\(`)
)

// referenceRights tell with whose rights public functions run, and which tables they or the private functions that they call touch.
func referenceRights(t *testing.T, db *pgtest.DB) map[string]string {
	// Clean-up passes names of tables to statements made at run time: it reads policies and overrides, and writes the others. A check names arguments.
	rows := kit.NoError(db.Pool.Query(t.Context(), `
		select proname::text as name, regexp_replace(regexp_replace(regexp_replace(prosrc,
		         '''(policies|overrides)''(?=[,)])', 'from \1', 'g'),
		         '(?<!refuse\(|check_length\()''((ephemeral_)?(buckets|idempotency_keys|slots|leases))''(?=[,)])', 'from \1 update \1', 'g'), '--[^\n]*|''([^'']|'''')*''', '', 'g') as source, private, prosecdef as definer,
		       coalesce(substring(proconfig::text from 'search_path=([^"]*)'), '') as path
		  from `+kit.PackageFunctions+` as p order by proname`))(t)
	functions := kit.NoError(pgx.CollectRows(rows, pgx.RowToStructByNameLax[referenceBody]))(t)
	tables := map[string]bool{}
	for _, table := range kit.Column(t, db, "select relname::text from pg_class where relnamespace = 'ratelimit'::regnamespace and relkind = 'r'") {
		tables[table] = true
	}
	byName := map[string]*referenceBody{}
	for i := range functions {
		byName[functions[i].Name] = &functions[i]
	}
	named := func(in *regexp.Regexp, source string, known func(string) bool) (names []string) {
		for _, match := range in.FindAllStringSubmatch(source, -1) {
			if known(match[1]) && !slices.Contains(names, match[1]) {
				names = append(names, match[1])
			}
		}
		return names
	}
	isTable := func(name string) bool { return tables[name] }
	isFunction := func(name string) bool { return byName[name] != nil }
	touched := func(name string, of *regexp.Regexp) string {
		seen, found := map[string]bool{}, map[string]bool{}
		var look func(string)
		look = func(name string) {
			if seen[name] {
				return
			}
			seen[name] = true
			for _, table := range named(of, byName[name].Source, isTable) {
				found["`"+strings.TrimPrefix(table, "ephemeral_")+"`"] = true
			}
			for _, call := range named(referenceCall, byName[name].Source, isFunction) {
				look(call)
			}
		}
		look(name)
		return cmp.Or(strings.Join(slices.Sorted(maps.Keys(found)), ", "), "none")
	}
	rights := map[string]string{}
	for _, f := range functions {
		if f.Private {
			require.False(t, f.Definer && f.Path == "", f.Name)
			continue
		}
		of := ""
		if f.Definer {
			require.Equal(t, "ratelimit, pg_temp", f.Path, f.Name)
		} else {
			of = " It runs with the rights of the caller."
		}
		rights[f.Name] = fmt.Sprintf(" Reads %s; writes %s.%s", touched(f.Name, referenceRead), touched(f.Name, referenceWrite), of)
	}
	return rights
}

// referenceSection writes what the comment of a function or a type says, by its lines: sentences, "name: meaning" of an argument or
// a column, and "Errors: …". A column without a line means what it means in a decision. Neighbours that mean the same share a row.
func referenceSection(body *strings.Builder, fields []referenceField, decision string) {
	lineOf := func(comment, name string) string {
		match := regexp.MustCompile(`\n` + name + `: .*`).FindString(comment)
		return strings.TrimPrefix(match, "\n"+name+": ")
	}
	rest := fields[0].Comment
	tables, kind := "", ""
	var row referenceField // its name may be of several fields, and its comment is their meaning
	endRow := func() {
		if row.Kind != "" {
			tables += fmt.Sprintf("| `%s` | %s | %s |\n", row.Name, row.Type, row.Comment)
		}
		row = referenceField{}
	}
	for _, field := range fields {
		meaning := lineOf(field.Comment, field.Name)
		if line := "\n" + field.Name + ": " + meaning; strings.Contains(rest, line) {
			rest = strings.Replace(rest, line, "", 1)
		} else if meaning != "" {
			meaning = " " // the line is about the argument of the same name
		}
		if kind != field.Kind {
			endRow()
			kind = field.Kind
			tables += "\n| " + kind + " | type | |\n|---|---|---|\n"
		}
		if kind == "column" && meaning == "" && fields[0].Comment != decision && lineOf(decision, field.Name) != "" {
			field.Type, meaning = "", "as in [ratelimit.decision](#ratelimitdecision)."
		}
		if row.Kind == kind && row.Type == field.Type && row.Comment == meaning {
			row.Name += "`, `" + field.Name
			continue
		}
		endRow()
		field.Kind, field.Comment = kind, meaning
		row = field
	}
	endRow()
	prose, facts, _ := strings.Cut(rest, "\nErrors: ")
	body.WriteString(prose + "\n" + tables)
	if returns := fields[0].Returns; strings.HasPrefix(returns, "ratelimit.") {
		fmt.Fprintf(body, "\nReturns [%s](#%s).\n", returns, strings.ReplaceAll(returns, ".", ""))
	} else if returns != "" {
		fmt.Fprintf(body, "\nReturns %s.\n", returns)
	}
	if facts != "" {
		facts = strings.Replace("Errors: "+facts, "\nLocks: nothing.\nWrites: nothing.", "\nLocks and writes: nothing.", 1)
		body.WriteString("\n" + referenceFact.ReplaceAllString(facts, "- **$1**: $2") + "\n")
	}
}
