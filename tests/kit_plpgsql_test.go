package tests

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// A source is an installed PL/pgSQL function taken apart: its SQL statements and the expressions
// that it evaluates. It knows as much of the language as the package uses and fails the test on
// anything else, so that nothing goes unexamined.
type source struct {
	t         testing.TB
	db        *pgtest.DB
	name      string
	variables map[string]string // type by name
	fields    map[string]string // type by table.column, and "" by column
	fragments []fragment
}

// A fragment is one SQL statement, or an expression as the query "select …". INTO is left out.
type fragment struct {
	tokens    []string
	statement bool
}

func (f fragment) String() string { return strings.Join(f.tokens, " ") }

// sourceOf reads the one function of that name, with or without its schema.
func sourceOf(t testing.TB, db *pgtest.DB, function string) *source {
	t.Helper()
	ctx := context.Background()
	name := function[strings.LastIndexByte(function, '.')+1:]
	s := &source{t: t, db: db, name: name, variables: map[string]string{"found": "boolean"}, fields: map[string]string{}}

	var code string
	var names, types []string
	require.NoError(t, db.Pool.QueryRow(ctx, `
		select prosrc, coalesce(proargnames, '{}'),
		       array(select format_type(t, null) from unnest(coalesce(proallargtypes, proargtypes::oid[])) with ordinality as u (t, n) order by n)
		  from pg_proc as p join pg_language as l on l.oid = p.prolang
		 where p.oid = $1::regproc and l.lanname = 'plpgsql'`, function).Scan(&code, &names, &types))
	rows, err := db.Pool.Query(ctx, `
		select relname, attname, format_type(atttypid, atttypmod)
		  from pg_attribute as a join pg_class as c on c.oid = a.attrelid
		 where c.relnamespace = 'ratelimit'::regnamespace and c.relkind = 'r' and attnum > 0`)
	require.NoError(t, err)
	var table, column, typ string
	_, err = pgx.ForEachRow(rows, []any{&table, &column, &typ}, func() error {
		s.fields[table+"."+column] = typ
		s.fields[column] = ""
		return nil
	})
	require.NoError(t, err)

	for i, arg := range names {
		s.variables[name+"."+arg] = types[i]
		if _, ambiguous := s.fields[arg]; !ambiguous {
			s.variables[arg] = types[i]
		}
	}
	s.parse(tokenize(code))
	require.NotEmpty(t, s.fragments)
	return s
}

var tokenPattern = regexp.MustCompile(`(?s)--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"[^"]*"` +
	`|[A-Za-z_]\w*(?:\.(?:[A-Za-z_]\w*|\*))*|\d+(?:\.\d+)?|\.\.|:=|::|=>|<<|>>|[-+*/<>=~!@#%^&|]+|\S`)

func tokenize(code string) []string {
	return slices.DeleteFunc(tokenPattern.FindAllString(code, -1), func(token string) bool {
		return strings.HasPrefix(token, "--") || strings.HasPrefix(token, "/*")
	})
}

func (s *source) parse(tokens []string) {
	// upTo returns the tokens before the first of some that is in no parentheses and in no CASE.
	upTo := func(ends ...string) []string {
		depth := 0
		for i, token := range tokens {
			switch {
			case depth == 0 && slices.Contains(ends, token):
				taken := tokens[:i]
				tokens = tokens[i+1:]
				return taken
			case token == "(" || token == "[" || token == "case":
				depth++
			case token == ")" || token == "]" || token == "end":
				depth--
			}
		}
		require.FailNow(s.t, "unterminated", "%s: %s", s.name, strings.Join(tokens, " "))
		return nil
	}
	if len(tokens) > 0 && tokens[0] == "declare" {
		tokens = tokens[1:]
		for tokens[0] != "begin" {
			s.declaration(upTo(";"))
		}
	}
	for len(tokens) > 0 {
		word := tokens[0]
		switch {
		case word == "begin" || word == "loop" || word == "else" || word == ";":
			tokens = tokens[1:]
		case word == "<<":
			upTo(">>")
		case word == "if" || word == "elsif":
			tokens = tokens[1:]
			s.expression(upTo("then"))
		case word == "while":
			tokens = tokens[1:]
			s.expression(upTo("loop"))
		case word == "for":
			variables := upTo("in")[1:]
			s.loop(variables, upTo("loop"))
		case word == "foreach":
			upTo("array")
			s.expression(upTo("loop"))
		case word == "end" || word == "raise" || word == "get" || word == "commit":
			tokens = tokens[1:]
			s.ignored(upTo(";"))
		case word == "exception":
			upTo("then")
		case word == "null" || word == "lock":
			upTo(";")
		case word == "exit" || word == "continue":
			jump := upTo(";")
			if i := slices.Index(jump, "when"); i >= 0 {
				s.expression(jump[i+1:])
			}
		case word == "return":
			switch value := upTo(";")[1:]; {
			case len(value) == 0 || value[0] == "next":
			case value[0] == "query":
				s.fragments = append(s.fragments, fragment{tokens: value[1:], statement: true})
			default:
				s.expression(value)
			}
		case word == "perform":
			tokens = tokens[1:]
			s.expression(upTo(";"))
		case slices.Contains([]string{"select", "insert", "update", "delete", "with"}, word):
			s.fragments = append(s.fragments, fragment{tokens: withoutInto(upTo(";")), statement: true})
		case len(tokens) > 1 && tokens[1] == ":=":
			tokens = tokens[2:]
			s.expression(upTo(";"))
		case len(tokens) > 1 && tokens[1] == "[": // an element of an array
			upTo(":=")
			s.expression(upTo(";"))
		default:
			require.FailNow(s.t, "a construct that these tests do not know", "%s: %s", s.name,
				strings.Join(tokens[:min(12, len(tokens))], " "))
		}
	}
}

func (s *source) declaration(tokens []string) {
	if tokens[1] == "alias" {
		s.variables[tokens[0]] = s.variables[tokens[3]]
		return
	}
	typ := tokens[1:]
	if i := slices.Index(tokens, ":="); i >= 0 {
		typ = tokens[1:i]
		s.expression(tokens[i+1:])
	}
	if typ[0] == "constant" {
		typ = typ[1:]
	}
	if i := slices.Index(typ, "collate"); i >= 0 {
		typ = typ[:i]
	}
	s.variables[tokens[0]] = strings.Join(typ, " ")
}

func (s *source) loop(variables, over []string) {
	if i := slices.Index(over, ".."); i >= 0 {
		if over[0] == "reverse" {
			over, i = over[1:], i-1
		}
		s.variables[variables[0]] = "integer"
		s.expression(over[:i])
		s.expression(over[i+1:])
		return
	}
	s.fragments = append(s.fragments, fragment{tokens: over, statement: true})

	if s.variables[variables[0]] != "record" {
		return
	}

	// The fields of a record are those of the query.
	variable := variables[0]
	conn := s.db.Connect(s.t)
	execute(s.t, conn, "set search_path = ratelimit, pg_temp")
	sql := strings.Join(s.rewrite(over, func(_, typ string) string { return "(null::" + typ + ")" }), " ")
	query, err := conn.Prepare(context.Background(), "", sql)
	require.NoError(s.t, err, "%s: %s", s.name, sql)
	s.variables[variable] = variable
	for _, field := range query.Fields {
		s.fields[variable+"."+field.Name] = column(s.t, s.db, "select format_type($1, null)", field.DataTypeOID)[0]
	}
}

func (s *source) expression(tokens []string) {
	s.fragments = append(s.fragments, fragment{tokens: append([]string{"select"}, tokens...)})
}

// ignored has to have nothing to examine.
func (s *source) ignored(tokens []string) {
	for _, token := range tokens {
		require.NotRegexp(s.t, `^ratelimit\.`, token)
	}
}

func withoutInto(tokens []string) []string {
	var kept []string
	for i := 0; i < len(tokens); i++ {
		if tokens[i] == "into" && tokens[i-1] != "insert" {
			i++
			for i+1 < len(tokens) && tokens[i+1] == "," {
				i += 2
			}
			continue
		}
		kept = append(kept, tokens[i])
	}
	return kept
}

// namesTable tells a table from a variable of its name.
func namesTable(tokens []string, i int) bool {
	return i > 0 && slices.Contains([]string{"from", "into", "join", "update", "using"}, tokens[i-1])
}

// namesQuery tells a query of a WITH from a variable of its name.
func namesQuery(tokens []string, i int) bool {
	return i+2 < len(tokens) && tokens[i+1] == "as" && (tokens[i+2] == "(" || tokens[i+2] == "materialized")
}

// rewrite replaces each variable by what replace returns for its name and type.
func (s *source) rewrite(tokens []string, replace func(name, typ string) string) []string {
	out := slices.Clone(tokens)
	for i := 0; i < len(out); i++ {
		token := out[i]
		if token == "as" && i+2 < len(out) && out[i+1] != "materialized" && out[i+1] != "(" {
			if i++; out[i+1] == "(" { // as name (columns)
				i += slices.Index(out[i:], ")")
			}
			continue
		}
		if namesTable(tokens, i) || namesQuery(tokens, i) || i > 0 && (tokens[i-1] == "::" || tokens[i-1] == ".") {
			continue
		}
		if typ, ok := s.variables[token]; ok {
			out[i] = replace(token, typ)
			continue
		}
		variable, field, ok := strings.Cut(token, ".")
		if !ok {
			continue
		}
		if table, ok := s.variables[variable]; ok {
			typ := s.fields[strings.TrimPrefix(table, "ratelimit.")+"."+field]
			require.NotEmpty(s.t, typ, "%s: the type of %s", s.name, token)
			out[i] = replace(token, typ)
		}
	}
	return out
}

// explain returns the plan of a fragment as the function has it: of variables the planner knows the
// type and not the value. The connection's search_path is the function's.
func (s *source) explain(conn *pgx.Conn, f fragment) string {
	s.t.Helper()
	ctx := context.Background()
	var types []string
	parameters := map[string]string{}
	sql := strings.Join(s.rewrite(f.tokens, func(name, typ string) string {
		if parameters[name] == "" {
			types = append(types, typ)
			parameters[name] = fmt.Sprintf("$%d", len(types))
		}
		return parameters[name]
	}), " ")

	prepare, arguments := "prepare fragment", ""
	if len(types) > 0 {
		prepare += "(" + strings.Join(types, ", ") + ")"
		arguments = "(null" + strings.Repeat(", null", len(types)-1) + ")"
	}
	execute(s.t, conn, "set plan_cache_mode = force_generic_plan; "+prepare+" as "+sql, pgx.QueryExecModeSimpleProtocol)
	defer execute(s.t, conn, "deallocate fragment")
	rows, err := conn.Query(ctx, "explain (verbose, costs off) execute fragment"+arguments, pgx.QueryExecModeSimpleProtocol)
	require.NoError(s.t, err)
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(s.t, err)
	return strings.Join(plan, "\n")
}

// clauses splits a statement at the words given, where they are in no parentheses. What comes before
// the first of them is under "".
func clauses(tokens []string, words ...string) map[string][]string {
	parts := map[string][]string{}
	word, depth := "", 0
	for _, token := range tokens {
		switch token {
		case "(", "[", "case":
			depth++
		case ")", "]", "end":
			depth--
		}
		if depth == 0 && slices.Contains(words, token) {
			word = token
			continue
		}
		parts[word] = append(parts[word], token)
	}
	return parts
}

// split splits tokens at a separator that is in no parentheses; of BETWEEN … AND … the AND is none.
func split(tokens []string, separator string) [][]string {
	parts := [][]string{nil}
	depth, between := 0, false
	for _, token := range tokens {
		switch token {
		case "(", "[", "case":
			depth++
		case ")", "]", "end":
			depth--
		case "between":
			between = between || depth == 0
		}
		if depth == 0 && token == separator {
			if !between || token != "and" {
				parts = append(parts, nil)
				continue
			}
			between = false
		}
		parts[len(parts)-1] = append(parts[len(parts)-1], token)
	}
	return parts
}
