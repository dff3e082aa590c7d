package packages

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// How the front of PL/Proxy answers each public function. The template front.sql says how for those that are neither routed
// nor refused.
var fronts = map[string]string{
	"ratelimit_acquire":          routed,
	"ratelimit_peek":             routed,
	"ratelimit_refund":           routed,
	"ratelimit_reset":            routed,
	"ratelimit_charge":           routed,
	"ratelimit_settle":           routed,
	"ratelimit_reserve":          routed,
	"ratelimit_acquire_up_to":    routed,
	"ratelimit_override":         routed,
	"ratelimit_remove_override":  routed,
	"ratelimit_enforce":          same,
	"ratelimit_acquire_all":      own,
	"ratelimit_acquire_many":     same,
	"ratelimit_acquire_all_many": same,
	"ratelimit_acquire_packed":   same,
	"ratelimit_define_policy":    own,
	"ratelimit_drop_policy":      own,
	"ratelimit_policies":         own,
	"ratelimit_overrides":        own,
	"ratelimit_status":           own,
	"ratelimit_cleanup":          own,
	"ratelimit_cleanup_all":      own,
	"ratelimit_doctor":           own,
	"ratelimit_version":          same,
	"ratelimit_shard":            own,
	"ratelimit_define_shard":     refused,
	"ratelimit_guard":            refused,
}

const (
	routed  = "routed"  // to the shard of the argument key
	own     = "own"     // by a body of its own
	same    = "same"    // by its body in sql/, which finds private functions of the same names here
	refused = "refused" // with 0A000
)

// A function is one of the public ones, as sql/ declares it.
type function struct {
	Kind       string // function or procedure
	Name       string
	Arguments  string // with their defaults
	Returns    string // empty for a procedure, and where arguments are out
	Volatility string
	Comment    string // the statement
	Text       string // the statement that creates it, as in sql/
	Release    string // as a literal of SQL

	In, Out []argument // Out are the columns of the result, if it has any
}

type argument struct{ Name, Type string }

// Front is how the front answers it.
func (f *function) Front() string { return fronts[f.Name] }

// Same reports whether its body is that of sql/.
func (f *function) Same() bool { return f.Front() == same }

// Asked reports whether shards are asked for it: as Carried says.
func (f *function) Asked() bool {
	switch f.Short() {
	case "acquire_packed", "version":
		return true
	case "shard", "cleanup_all": // by statements of their own
		return false
	}
	return f.Front() == routed || f.Front() == own
}

// Short is its name without the prefix.
func (f *function) Short() string { return strings.TrimPrefix(f.Name, "ratelimit_") }

// Lists reports whether it returns any number of rows.
func (f *function) Lists() bool { return strings.HasPrefix(f.Returns, "table") }

// Parameters declare its arguments, without defaults.
func (f *function) Parameters() string { return each(f.In, ", %[1]s %[2]s") }

// Passed are its arguments for a statement of PL/Proxy.
func (f *function) Passed() string { return strings.TrimPrefix(each(f.In, ", %[1]s"), ", ") }

// Given are its arguments in its own body.
func (f *function) Given() string { return each(f.In, ", "+f.Name+".%[1]s") }

// Columns declare those of its result.
func (f *function) Columns() string { return strings.TrimPrefix(each(f.Out, ", %[1]s %[2]s"), ", ") }

// Carried declares the result of the function that fetches its answer from a shard. An array of a type of this package has
// another number in each database, so it is carried as text.
func (f *function) Carried() string {
	switch {
	case f.Lists():
		return "returns text"
	case len(f.Out) == 0:
		return "returns " + f.Returns
	}
	return "returns record"
}

// CarriedColumns declares the columns of Carried.
func (f *function) CarriedColumns() string {
	if f.Lists() {
		return ""
	}
	return f.eachOut(", out %[1]s text", ", out %[1]s %[2]s")
}

// Fetched is what the statement of that function selects.
func (f *function) Fetched() string {
	switch {
	case f.Lists():
		return "coalesce(json_agg(r), '[]')::text"
	case len(f.Out) == 0:
		return "r.*"
	}
	return strings.TrimPrefix(f.eachOut(", r.%[1]s::text", ", r.%[1]s"), ", ")
}

func (f *function) eachOut(ours, others string) (text string) {
	for _, out := range f.Out {
		format := others
		if strings.HasPrefix(out.Type, "ratelimit.") && strings.HasSuffix(out.Type, "[]") {
			format = ours
		}
		text += each([]argument{out}, format)
	}
	return text
}

func each(arguments []argument, format string) (text string) {
	for _, a := range arguments {
		text += fmt.Sprintf(strings.ReplaceAll(format, "%[2]s", strings.ReplaceAll(a.Type, "%", "%%")), a.Name)
	}
	return text
}

var (
	declaredFunction = regexp.MustCompile(`(?m)^create or replace (function|procedure) (ratelimit_[a-z_]+)\(([^$]*?)\)\n(?:  returns ([^$]*?)\n)?  language [a-z]+\n(?:  (volatile|stable|immutable)\n)?`)
	declaredType     = regexp.MustCompile(`(?m)^create type ratelimit\.([a-z_]+) as \([^;]*\);`)
	commentOn        = `(?m)^comment on %s[^;]*?is\n  '(?:[^']|'')*';`
	declaredArgument = regexp.MustCompile(`^(?:(in|out|inout) +)?([a-z_]+) +([a-z. ]+?(?:\[\])?)(?: default .*)?$`)
)

// publicFunctions are those of the newest release, by name.
func (s *source) publicFunctions() (functions []*function, err error) {
	text := s.Known[len(s.Known)-1].UpSQL
	for _, found := range declaredFunction.FindAllStringSubmatch(text, -1) {
		f := &function{Kind: found[1], Name: found[2], Arguments: found[3], Returns: found[4], Volatility: found[5]}
		if f.Front() == "" {
			return nil, fmt.Errorf("nothing says how the front of PL/Proxy answers %s", f.Name)
		}
		columns := ""
		if f.Lists() {
			columns = strings.TrimSuffix(f.Returns[strings.Index(f.Returns, "(")+1:], ")")
		}
		for _, declared := range []struct{ list, mode string }{{f.Arguments, "in"}, {columns, "out"}} {
			for _, declaration := range strings.Split(declared.list, ",") {
				declaration = strings.Join(strings.Fields(declaration), " ")
				if declaration == "" {
					continue
				}
				part := declaredArgument.FindStringSubmatch(declaration)
				if part == nil {
					return nil, fmt.Errorf("%s: %q is no argument that can be read", f.Name, declaration)
				}
				a := argument{part[2], strings.TrimSpace(part[3])}
				if part[1] == "out" || declared.mode == "out" {
					f.Out = append(f.Out, a)
				} else {
					f.In = append(f.In, a)
				}
			}
		}
		if f.Comment = regexp.MustCompile(fmt.Sprintf(commentOn, f.Kind+" "+f.Name+`\(`)).FindString(text); f.Comment == "" {
			return nil, fmt.Errorf("%s has no comment", f.Name)
		}
		if f.Text = regexp.MustCompile(`(?ms)^create or replace ` + f.Kind + ` ` + f.Name + `\(.*?^\$\$;`).FindString(text); f.Text == "" {
			return nil, fmt.Errorf("%s has no body", f.Name)
		}
		f.Text = strings.Replace(f.Text, "create or replace", "create", 1)
		f.Release = "'" + s.Newest().Version + "'"
		functions = append(functions, f)
	}
	if len(functions) != len(fronts) {
		return nil, fmt.Errorf("%d public functions are declared, and the front of PL/Proxy answers %d", len(functions), len(fronts))
	}
	slices.SortFunc(functions, func(a, b *function) int { return strings.Compare(a.Name, b.Name) })
	return functions, nil
}

// publicTypes are the statements that create the types which public functions return, and their comments.
func (s *source) publicTypes(functions []*function) (statements []string, err error) {
	for _, name := range []string{"decision", "packed", "reservation", "partial_decision"} {
		if !slices.ContainsFunc(functions, func(f *function) bool { return strings.Contains(f.Returns, "ratelimit."+name) }) {
			return nil, fmt.Errorf("no function returns ratelimit.%s", name)
		}
		var create, comment string
		for _, m := range s.Known {
			for _, found := range declaredType.FindAllStringSubmatch(m.UpSQL, -1) {
				if found[1] == name {
					create = found[0]
					comment = regexp.MustCompile(fmt.Sprintf(commentOn, `type ratelimit\.`+name+" ")).FindString(m.UpSQL)
				}
			}
		}
		statements = append(statements, create, comment)
	}
	return statements, nil
}

// helper is a private function of sql/, as it stands there.
func (s *source) helper(name string) (string, error) {
	text := s.Known[len(s.Known)-1].UpSQL
	function := regexp.MustCompile(`(?ms)^create or replace (function ratelimit\.` + name + `\(.*?^\$\$;)`).FindStringSubmatch(text)
	comment := regexp.MustCompile(fmt.Sprintf(commentOn, `function ratelimit\.`+name+`\(`)).FindString(text)
	if function == nil || comment == "" {
		return "", fmt.Errorf("there is no helper %s", name)
	}
	return "create " + function[1] + "\n" + comment, nil
}

// body is what follows the declaration of a function in the front.
func (s *source) body(f *function) (string, error) {
	name := f.Front()
	if name == own {
		name = "front " + f.Name
	}
	files, err := s.execute(f, map[string]string{"": name})
	return string(files[""]), err
}

// plproxy makes the file that turns a database into a front of shards, by PL/Proxy.
func plproxy(s *source) (Files, error) {
	functions, err := s.publicFunctions()
	if err != nil {
		return nil, err
	}
	types, err := s.publicTypes(functions)
	if err != nil {
		return nil, err
	}
	return s.execute(struct {
		*source
		Functions []*function
		Types     []string
	}{s, functions, types}, map[string]string{"front.sql": "front.sql"})
}
