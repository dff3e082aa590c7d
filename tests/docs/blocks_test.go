// Package docs tests the documentation: its SQL is run, its Go compiled, its examples run, its links, grants and reference checked.
package docs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// A docsFile is one page, by its path from the repository's root.
type docsFile struct {
	path   string
	text   string
	blocks []docsBlock
}

type docsBlock struct {
	tag, text string
	line      int // of its first line
}

func docsFiles(t testing.TB) (files []docsFile) {
	var paths []string
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../docs/examples/*.md", "../../pg_cron/*.md"} {
		found := kit.NoError(filepath.Glob(pattern))(t)
		require.NotEmpty(t, found, pattern)
		paths = append(paths, found...)
	}
	for _, path := range paths {
		text := kit.NoError(os.ReadFile(path))(t)
		blocks, err := docsBlocks(string(text))
		require.NoError(t, err, path)
		files = append(files, docsFile{strings.TrimPrefix(path, "../../"), string(text), blocks})
	}
	return files
}

var docsTags = []string{"sql", "psql", "go", "js", "sh", "text", "yaml"}

func docsBlocks(text string) (blocks []docsBlock, err error) {
	var open *docsBlock
	for i, line := range strings.Split(text, "\n") {
		fence, isFence := strings.CutPrefix(strings.TrimLeft(line, " "), "```")
		switch {
		case isFence && open == nil:
			if !slices.Contains(docsTags, fence) {
				return nil, fmt.Errorf("line %d: a block has the tag %q; the tags are %v", i+1, fence, docsTags)
			}
			open = &docsBlock{tag: fence, line: i + 2}
		case isFence:
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.text += line + "\n"
		}
	}
	if open != nil {
		return nil, fmt.Errorf("line %d: a block does not end", open.line)
	}
	return blocks, nil
}

func TestDocs_SQL(t *testing.T) {
	t.Parallel()
	ran, files := 0, 0
	for _, file := range docsFiles(t) {
		t.Run(file.path, func(t *testing.T) {
			files++
			session := newDocsSession(t)
			for _, block := range file.blocks {
				did, err := session.run(block)
				require.NoError(t, err, "%s, the block of line %d", file.path, block.line)
				ran += did
			}
		})
	}
	if files == len(docsFiles(t)) {
		require.Greater(t, ran, 50, "statements")
	}
}

// Each of these is wrong, and must be found.
func TestDocs_SQLChecker(t *testing.T) {
	t.Parallel()
	session := newDocsSession(t)
	require.NoError(t, kit.ErrorOf(session.run(docsBlock{tag: "sql", text: "select ratelimit_define_policy('p', 5, 1, '1 second');\n"})))
	const statement = "=> select allowed, remaining, reset_after from ratelimit_peek('p', 'k', 5);\n"
	const right = " allowed | remaining | reset_after\n---------+-----------+-------------\n t       | 5         | 00:00:00\n"
	for name, test := range map[string]struct{ tag, text string }{
		"a wrong value":         {"psql", statement + strings.Replace(right, "| 5 ", "| 4 ", 1)},
		"a wrong time":          {"psql", statement + strings.Replace(right, "00:00:00", "00:00:01", 1)},
		"a wrong fraction":      {"psql", statement + strings.Replace(right, "00:00:00", "00:00:00.25", 1)},
		"a wrong column":        {"psql", statement + strings.Replace(right, "remaining", "remained", 1)},
		"a missing row":         {"psql", statement + strings.TrimSuffix(right, " t       | 5         | 00:00:00\n")},
		"a row too many":        {"psql", statement + right + " t       | 5         | 00:00:00\n"},
		"a wrong count":         {"psql", statement + right + "(2 rows)\n"},
		"a missing cell":        {"psql", statement + strings.Replace(right, "| 00:00:00", "", 1)},
		"no output shown":       {"psql", statement},
		"an error not shown":    {"psql", "=> select 1 / 0;\n"},
		"another error":         {"psql", "=> select 1 / 0;\nERROR:  division by one\n"},
		"another hint":          {"psql", "=> select ratelimit_peek('q', 'k');\nERROR:  unknown policy\nHINT:  None.\n"},
		"an error that is none": {"psql", statement + "ERROR:  division by zero\n"},
		"no table":              {"psql", statement + "something\n"},
		"no prompt":             {"psql", "select 1;\n"},
		"no semicolon":          {"psql", "=> select 1\n"},
		"nothing":               {"psql", "\n"},
		"a failing statement":   {"sql", "select 1;\nselect 1 / 0;\n"},
		"no end":                {"sql", "select 1;\nselect 2\n"},
	} {
		assert.Error(t, kit.ErrorOf(session.run(docsBlock{tag: test.tag, text: test.text})), name)
	}
	did := kit.NoError(session.run(docsBlock{tag: "psql", text: statement + right + "(1 row)\n\n=> select 1 / 0;\nERROR:  division by zero\n"}))(t)
	require.Equal(t, 2, did)

	for name, text := range map[string]string{
		"no tag":          "```\nselect 1;\n```\n",
		"an unknown tag":  "```sqll\nselect 1;\n```\n",
		"a tag with more": "```sql skip\nselect 1;\n```\n",
		"no end":          "```sql\nselect 1;\n",
	} {
		assert.Error(t, kit.ErrorOf(docsBlocks(text)), name)
	}
}

// A docsSession runs the blocks of one page. A role of the test's stands for role app.
type docsSession struct {
	conn *pgconn.PgConn
	role string
}

func newDocsSession(t *testing.T) *docsSession {
	role := kit.NewRole(t)
	db := kit.NewDB(t)
	db.SetClock(time.Now())
	return &docsSession{db.Connect(t).PgConn(), role}
}

var docsRole = regexp.MustCompile(`\b(to|role) app\b`)

// run returns how many statements it ran.
func (s *docsSession) run(block docsBlock) (ran int, err error) {
	switch block.tag {
	case "sql":
		statements := kit.Statements(block.text)
		if rest := strings.TrimSpace(block.text[len(strings.Join(statements, "")):]); rest != "" {
			return 0, fmt.Errorf("no semicolon ends %q", rest)
		}
		for _, statement := range statements {
			if _, err := s.Execute(statement); err != nil {
				return ran, fmt.Errorf("%w\n%s", err, statement)
			}
			ran++
		}
		return ran, nil
	case "psql":
		for text := strings.TrimSpace(block.text); text != "" || ran == 0; ran++ {
			prompted, ok := strings.CutPrefix(text, "=> ")
			if !ok {
				return ran, fmt.Errorf("no prompt before %.60q", text)
			}
			prompted, text, _ = strings.Cut(prompted, "\n=> ")
			if text != "" {
				text = "=> " + text
			}
			statements := kit.Statements(prompted)
			if len(statements) == 0 {
				return ran, fmt.Errorf("no semicolon ends %q", prompted)
			}
			if err := s.compare(statements[0], strings.TrimSpace(prompted[len(statements[0]):])); err != nil {
				return ran, fmt.Errorf("%w\n%s", err, statements[0])
			}
		}
		return ran, nil
	}
	return 0, nil
}

func (s *docsSession) Execute(statement string) (*pgconn.Result, error) {
	results, err := s.conn.Exec(context.Background(), docsRole.ReplaceAllString(statement, "$1 "+s.role)).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != 1 {
		return nil, fmt.Errorf("it is %d statements", len(results))
	}
	return results[0], results[0].Err
}

// compare runs a statement and tells how its output differs from that shown.
func (s *docsSession) compare(statement, shown string) error {
	result, err := s.Execute(statement)
	lines := strings.Split(shown, "\n")
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		if lines[0] != "ERROR:  "+pgErr.Message {
			return fmt.Errorf("shown is %q: %w", shown, err)
		}
		for _, line := range lines[1:] {
			if line != "DETAIL:  "+pgErr.Detail && line != "HINT:  "+pgErr.Hint {
				return fmt.Errorf("shown is %q: %s, %s", line, pgErr.Detail, pgErr.Hint)
			}
		}
		return nil
	}
	if err != nil {
		return err
	}

	row := func(cells []string) string {
		for i, cell := range cells {
			cells[i] = docsWholeSeconds(strings.TrimSpace(cell))
		}
		return strings.Join(cells, "|")
	}
	var columns, got []string
	for _, field := range result.FieldDescriptions {
		columns = append(columns, field.Name)
	}
	for _, values := range result.Rows {
		var cells []string
		for _, value := range values {
			cells = append(cells, string(value))
		}
		got = append(got, row(cells))
	}
	if shown == "" {
		if strings.Trim(strings.Join(got, ""), "|") != "" { // a function that returns void has one empty cell
			return fmt.Errorf("it has output, and none is shown: %v", got)
		}
		return nil
	}
	if count, ok := strings.CutPrefix(lines[len(lines)-1], "("); ok {
		if n, err := strconv.Atoi(strings.Fields(count)[0]); err != nil || n != len(result.Rows) {
			return fmt.Errorf("there are %d rows, shown is (%s", len(result.Rows), count)
		}
		lines = lines[:len(lines)-1]
	}
	if len(lines) < 2 || strings.Trim(lines[1], "-+") != "" {
		return fmt.Errorf("shown is no table and no error: %q", shown)
	}
	lines = slices.Delete(lines, 1, 2)
	for i, line := range lines {
		lines[i] = row(strings.Split(line, "|"))
	}
	if got = append([]string{row(columns)}, got...); !slices.Equal(lines, got) {
		return fmt.Errorf("shown is\n%s\nand it is\n%s", strings.Join(lines, "\n"), strings.Join(got, "\n"))
	}
	return nil
}

var docsTime = regexp.MustCompile(`^(\d+):(\d\d):(\d\d\.\d+)$`)

// docsWholeSeconds rounds a time with a fraction up.
func docsWholeSeconds(cell string) string {
	d, err := time.ParseDuration(docsTime.ReplaceAllString(cell, "${1}h${2}m${3}s"))
	if err != nil || !docsTime.MatchString(cell) {
		return cell
	}
	seconds := int64((d + time.Second - 1) / time.Second)
	return fmt.Sprintf("%02d:%02d:%02d", seconds/3600, seconds/60%60, seconds%60)
}

// What a Go block may use without declaring it.
const docsEnvironment = `package docs

import (
	"context"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
)

var (
	ctx     context.Context
	pool    *pgxpool.Pool
	conn    *pgx.Conn
	limiter *client.Limiter
	mux     *http.ServeMux
	w       http.ResponseWriter
	r       *http.Request

	errNever, errTooMany error = errors.New("never"), errors.New("too many")
)

func userOf(*http.Request) string { return "" }
`

var docsImports = []string{
	"context", "errors", "fmt", "log/slog", "net/http", "strconv", "testing", "time",
	"github.com/jackc/pgx/v5", "github.com/jackc/pgx/v5/pgxpool",
	"github.com/pgratelimit/pgratelimit/client", "github.com/pgratelimit/pgratelimit/client/clienttest",
	"github.com/pgratelimit/pgratelimit/client/httplimit", "github.com/pgratelimit/pgratelimit/client/outgoing", "github.com/pgratelimit/pgratelimit/migrations",
	"github.com/riverqueue/river", "github.com/riverqueue/river/rivertype", // of the module tests, in go.work
}

var docsDeclared = regexp.MustCompile(`(?m)^(\w+(?:, \w+)*) :=`)

// docsGo makes a file of a block; at is the directive that tells the compiler where the block stands.
func docsGo(at, text string) string {
	if strings.HasPrefix(text, "package ") {
		return at + text
	}
	var file strings.Builder
	file.WriteString("package docs\n\n")
	code := regexp.MustCompile(`//.*`).ReplaceAllString(text, "")
	for _, path := range docsImports {
		name := filepath.Base(strings.TrimSuffix(path, "/v5"))
		if regexp.MustCompile(`\b` + name + `\.`).MatchString(code) {
			fmt.Fprintf(&file, "import %s %q\n", name, path)
		}
	}
	if regexp.MustCompile(`(?m)^(func|type|var) `).MatchString(text) {
		return file.String() + at + text
	}
	file.WriteString("func _() error {\n" + at + text)
	for _, names := range docsDeclared.FindAllStringSubmatch(text, -1) {
		for name := range strings.SplitSeq(names[1], ", ") {
			if name != "_" {
				fmt.Fprintf(&file, "_ = %s\n", name) // a quotation need not use what it shows
			}
		}
	}
	file.WriteString("return nil\n}\n")
	return file.String()
}

func TestDocs_GoCompiles(t *testing.T) {
	t.Parallel()
	out, err := buildDocs(t, docsGo("", "return limiter\n"))
	require.Error(t, err, "a block that does not compile is found: %s", out)

	var files []string
	for _, file := range docsFiles(t) {
		for _, block := range file.blocks {
			if block.tag == "go" {
				files = append(files, docsGo(fmt.Sprintf("//line %s:%d\n", file.path, block.line), block.text))
			}
		}
	}
	require.Greater(t, len(files), 5)
	out, err = buildDocs(t, files...)
	require.NoError(t, err, out)
}

// buildDocs compiles each file as a package of the module, which is there for the compiler only.
func buildDocs(t *testing.T, files ...string) (out string, err error) {
	dir := t.TempDir()
	root := kit.NoError(filepath.Abs("../.."))(t)
	overlay := map[string]string{}
	args := []string{"build", "-overlay", filepath.Join(dir, "overlay.json")}
	add := func(path, text string) {
		copied := filepath.Join(dir, fmt.Sprintf("%d.go", len(overlay)))
		require.NoError(t, os.WriteFile(copied, []byte(text), 0o600))
		overlay[filepath.Join(root, path)] = copied
	}
	for i, file := range files {
		pkg := fmt.Sprintf("tests/docs_block_%d", i)
		add(pkg+"/block.go", file)
		add(pkg+"/environment.go", docsEnvironment)
		args = append(args, "./"+pkg)
	}
	text := kit.NoError(json.Marshal(map[string]any{"Replace": overlay}))(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), text, 0o600))
	command := exec.Command("go", args...)
	command.Dir = root
	combined, err := command.CombinedOutput()
	return string(combined), err
}

var (
	docsLink    = regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)\s]*))?\)`)
	docsHeading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	docsPath    = regexp.MustCompile(`\b(?:sql|migrations|client|pg_cron|docker|docs|tests|server)/[\w./-]*\w`)
	docsTarget  = regexp.MustCompile(`\bmake ([a-z]+(?:-[a-z]+)*)`)
)

func TestDocs_LinksFilesAndTargetsAreThere(t *testing.T) {
	t.Parallel()
	makefile := kit.NoError(os.ReadFile("../../Makefile"))(t)
	anchors := map[string][]string{}
	files := docsFiles(t)
	for _, file := range files {
		for _, heading := range docsHeading.FindAllStringSubmatch(file.text, -1) {
			anchor := regexp.MustCompile(`[^\w -]`).ReplaceAllString(strings.ToLower(heading[1]), "")
			anchors[file.path] = append(anchors[file.path], strings.ReplaceAll(anchor, " ", "-"))
		}
	}
	for _, file := range files {
		prose := file.text
		for _, block := range file.blocks {
			prose = strings.Replace(prose, block.text, "", 1)
			if block.tag != "sh" {
				continue
			}
			for _, path := range docsPath.FindAllString(block.text, -1) {
				assert.NoError(t, kit.ErrorOf(os.Stat(filepath.Join("../..", path))), file.path)
			}
			for _, target := range docsTarget.FindAllStringSubmatch(block.text, -1) {
				assert.True(t, strings.Contains(string(makefile), "\n"+target[1]+":"), "%s: make %s", file.path, target[1])
			}
		}
		for _, link := range docsLink.FindAllStringSubmatch(prose, -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			at := file.path
			if link[1] != "" {
				at = filepath.Join(filepath.Dir(file.path), link[1])
				assert.NoError(t, kit.ErrorOf(os.Stat(filepath.Join("../..", at))), "%s links to %s", file.path, link[1])
			}
			if link[2] != "" {
				assert.Contains(t, anchors[at], link[2], "%s links to %s#%s", file.path, link[1], link[2])
			}
		}
	}
}

// A test that a page names as its proof is there.
func TestDocs_NamedTestsAreThere(t *testing.T) {
	t.Parallel()
	defined := map[string]bool{}
	require.NoError(t, filepath.WalkDir("..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		for _, test := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(string(kit.NoError(os.ReadFile(path))(t)), -1) {
			defined[test[1]] = true
		}
		return nil
	}))
	named := 0
	for _, file := range docsFiles(t) {
		for _, test := range regexp.MustCompile("`(Test[A-Z]\\w+)`").FindAllStringSubmatch(file.text, -1) {
			named++
			assert.True(t, defined[test[1]], "%s names %s", file.path, test[1])
		}
	}
	require.NotZero(t, named)
}

func TestDocs_ReadmeIsShort(t *testing.T) {
	t.Parallel()
	text := kit.NoError(os.ReadFile("../../README.md"))(t)
	require.LessOrEqual(t, strings.Count(string(text), "\n"), 150)
}

// A number that a page states is the number of the code: the phrase is in the page, and the pattern in the file.
func TestDocs_NumbersAreThoseOfTheCode(t *testing.T) {
	t.Parallel()
	for _, number := range []struct{ page, phrase, file, pattern string }{
		{"docs/design.md", "have 1 to 512 bytes", "sql/checks.sql", `octet_length\(value\) between 1 and 512\n`},
		{"docs/design.md", "Capacity and refill are 0 to 9×10¹² tokens", "sql/checks.sql", `refill between 0 and 9000000000000\)`},
		{"docs/design.md", "Intervals are 1 µs to 1000 years", "sql/checks.sql", `1 microsecond to 365250 days \(1000 years\)`},
		{"docs/design.md", "must fill within 10,000 years", "sql/checks.sql", `must fill within 10000 years`},
		{"docs/design.md", "Debt ends at a floor: 9×10¹² tokens", "sql/arithmetic.sql", `select 9000000000000000000\n`},
		{"docs/design.md", "has been due for five minutes", "sql/cleanup_batch.sql", `clock\(\) - interval '5 minutes'`},
	} {
		page := kit.NoError(os.ReadFile("../../" + number.page))(t)
		require.Contains(t, strings.Join(strings.Fields(string(page)), " "), number.phrase, number.page)
		file := kit.NoError(os.ReadFile("../../" + number.file))(t)
		require.True(t, regexp.MustCompile(number.pattern).Match(file), "%s says %q, and %s does not", number.page, number.phrase, number.file)
	}
}

// Every row of the table of grants: a role with these can do what the row says, and nothing else.
func TestDocs_Grants(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	sql := func(statement string) func(*pgxpool.Pool) error {
		return func(pool *pgxpool.Pool) error { return kit.ErrorOf(pool.Exec(ctx, statement)) }
	}
	both := []client.Charge{{Policy: "p", Key: "k"}, {Policy: "p", Key: "l"}}
	uses := map[string]func(pool *pgxpool.Pool) error{
		"acquire, from SQL or with `client.New`": func(pool *pgxpool.Pool) error {
			limiter := client.New(pool)
			if err := kit.ErrorOf(limiter.Peek(ctx, "p", "k")); !strings.Contains(fmt.Sprint(err), "grant execute on function ratelimit_peek(") {
				return fmt.Errorf("peek: %w", err)
			}
			return errors.Join(kit.ErrorOf(kit.Acquire(pool, "p", "k", 1, "first")), kit.ErrorOf(limiter.Acquire(ctx, "p", "k")),
				kit.ErrorOf(limiter.AcquireAll(ctx, both)))
		},
		"acquire, and show [HTTP fields](languages.md), from SQL": sql("select ratelimit_http_fields('p', d) from ratelimit_acquire('p', 'k') as d"),
		"acquire with a `Combiner`": func(pool *pgxpool.Pool) error {
			limiter := client.NewCombiner(pool)
			defer limiter.Close()
			var callers errgroup.Group
			for n := range 64 {
				callers.Go(func() (err error) {
					for i := range 20 {
						key, other := strconv.Itoa((n+i)%8), []client.Charge{{Policy: "p", Key: strconv.Itoa(n % 8)}, {Policy: "p", Key: strconv.Itoa(i % 8)}}
						err = errors.Join(err, kit.ErrorOf(limiter.Acquire(ctx, "p", key, client.IdempotencyKey(fmt.Sprint(n, i)))),
							kit.ErrorOf(limiter.Acquire(ctx, "p", key)), kit.ErrorOf(limiter.AcquireAll(ctx, other)))
					}
					return err
				})
			}
			return callers.Wait()
		},
		"acquire with a [`Prefetcher`](prefetch.md)": func(pool *pgxpool.Pool) error {
			limiter := client.NewPrefetcher(pool, client.Prefetch{Policy: "p"})
			defer limiter.Close() // which needs ratelimit_refund
			var callers errgroup.Group
			for range 8 {
				callers.Go(func() error {
					for begin := time.Now(); time.Since(begin) < kit.Patience; {
						if d, err := limiter.Acquire(ctx, "p", "k"); err != nil || d.Estimated {
							return err
						}
					}
					return errors.New("no grant from a lease")
				})
			}
			return errors.Join(kit.ErrorOf(limiter.AcquireAll(ctx, both[:1])), callers.Wait())
		},
		"acquire from a [shard](sharding.md) with `client.NewSharded`": func(pool *pgxpool.Pool) error {
			if err := kit.ErrorOf(client.NewSharded(ctx, []*pgxpool.Pool{pool})); !errors.Is(err, client.ErrWrongShard) {
				return fmt.Errorf("not a shard: %w", err)
			}
			return nil
		},
		"make a database a [shard](sharding.md)": sql("select ratelimit_define_shard(0, 1)"),
		"acquire an estimate, and [settle](spending.md) it": sql(`
			select ratelimit_acquire('p', 'k', 2, 'one'), ratelimit_acquire_all(array['p'], array['k'], array[2], 'two');
			select ratelimit_settle('p', 'k', 'one', 1), ratelimit_settle_all(array['p'], array['k'], 'two', array[1])`),
		"[reserve](queues.md), also by `wait` of a client": sql("select ratelimit_reserve('p', 'k', '1 hour', 1, 'one'); select ratelimit_settle('p', 'k', 'one', 0)"),
		"send [requests to an upstream](outgoing.md) by a client": sql(`
			select ratelimit_acquire_all(array['p'], array['k']), ratelimit_refund('p', 'k', 1), ratelimit_pause('p', 'k', '1 second')`),
		"other calls of an application": sql(`select ratelimit_acquire_many(array['p'], array['k']), ratelimit_acquire_up_to('p', 'k', 2),
			ratelimit_charge('p', 'k', 1), ratelimit_enforce('p', 'k'), ratelimit_peek('p', 'k')`),
		"hold [slots](slots.md)": func(pool *pgxpool.Pool) error {
			limiter := client.New(pool)
			h, d, err := limiter.Hold(ctx, "s", "k")
			if err != nil || !d.Allowed {
				return fmt.Errorf("not held: %w", err)
			}
			return errors.Join(kit.ErrorOf(limiter.Peek(ctx, "s", "k")), kit.ErrorOf(limiter.Renew(ctx, "s", "k", h.Holder())), h.Release(ctx))
		},
		"administration": func(pool *pgxpool.Pool) error {
			limiter := client.New(pool)
			return errors.Join(limiter.DefinePolicy(ctx, client.Policy{Name: "q", Capacity: 1, Refill: 1, Every: time.Second}),
				limiter.Reset(ctx, "q", "k"), kit.ErrorOf(limiter.Policies(ctx)), kit.ErrorOf(limiter.Holders(ctx)), limiter.DropPolicy(ctx, "q"),
				limiter.DefinePolicy(ctx, client.Policy{Name: "q", Capacity: 1, Period: client.Period{Months: 1}}),
				sql("select ratelimit_grants('q'), ratelimit_usage('q')")(pool))
		},
		"overrides": func(pool *pgxpool.Pool) error {
			limiter := client.New(pool)
			return errors.Join(limiter.Override(ctx, client.Override{Policy: "p", Key: "k", Capacity: 1}), kit.ErrorOf(limiter.Overrides(ctx)),
				kit.ErrorOf(limiter.RemoveOverride(ctx, "p", "k")))
		},
		"attach a [guard](tables.md) to a table of its own": sql(`
			create temporary table orders (customer text);
			create trigger limited after insert on orders referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer');
			insert into orders values ('k')`),
		"monitoring":                    sql("select ratelimit_policies(), ratelimit_status(), ratelimit_doctor()"),
		"reset all buckets of a policy": func(pool *pgxpool.Pool) error { return client.New(pool).ResetAll(ctx, "p") },
		"clean up one batch":            func(pool *pgxpool.Pool) error { return kit.ErrorOf(client.New(pool).Cleanup(ctx)) },
		"clean up all that is due":      sql("call ratelimit_cleanup_all()"),
	}
	page := kit.NoError(os.ReadFile("../../docs/operating.md"))(t)
	_, table, found := strings.Cut(string(page), "\n| use | functions |\n|---|---|\n")
	require.True(t, found)
	table, _, _ = strings.Cut(table, "\n\n")
	rows := regexp.MustCompile("(?m)^\\| (.*) \\| (`.*) \\|$").FindAllStringSubmatch(table, -1)
	require.Len(t, rows, len(uses))
	for _, function := range kit.Column(t, kit.NewDB(t).DB, `
		select proname::text from pg_proc where proname ~ '^ratelimit_' and obj_description(oid, 'pg_proc') ~ 'Role: application'`) {
		require.Regexp(t, `\b`+function+`\b`, table)
	}
	for _, row := range rows {
		t.Run(row[1], func(t *testing.T) {
			t.Parallel()
			use := uses[row[1]]
			require.NotNil(t, use, "no test knows this row")
			role := kit.NewRole(t)
			db := kit.NewDB(t)
			db.DefinePolicy("p", 1_000_000, 1, time.Hour)
			db.Execute("select ratelimit_define_policy('s', capacity => 1, lease => '1 hour')")
			pool := kit.PoolAs(t, db.DB, role)
			var granted []string
			for _, cell := range regexp.MustCompile("`([^`]*)`").FindAllStringSubmatch(row[2], -1) {
				grant := cell[1]
				if !strings.HasPrefix(grant, "grant ") {
					grant = "grant execute on function " + grant + " to app"
				}
				db.Execute(strings.ReplaceAll(grant, " to app", " to "+role))
				granted = append(granted, regexp.MustCompile(`\b(ratelimit_\w+|cleanup_batch|reset_batch)`).FindAllString(grant, -1)...)
			}
			require.NoError(t, use(pool))

			require.ElementsMatch(t, granted, kit.Column(t, db.DB,
				"select p.proname::text from "+kit.PackageFunctions+" as p where has_function_privilege($1, p.oid, 'execute')", role))
			require.Empty(t, kit.Column(t, db.DB, `
				select c.relname::text from pg_class as c
				 where c.relnamespace = 'ratelimit'::regnamespace
				   and c.relkind = 'r'
				   and has_table_privilege($1, c.oid, 'select, insert, update, delete, truncate, references, trigger')`, role))
		})
	}
}

// The first grant that a page shows lets a role ask one bucket and several, as the page goes on to do.
func TestDocs_TheFirstGrantIsForOneBucketAndSeveral(t *testing.T) {
	t.Parallel()
	for _, page := range []string{"README.md", "docs/languages.md"} {
		text := kit.NoError(os.ReadFile("../../" + page))(t)
		grant := regexp.MustCompile(`grant execute on function [a-z_, ]+ to app`).Find(text)
		require.NotNil(t, grant, page)
		role, db := kit.NewRole(t), kit.NewDB(t)
		db.DefinePolicy("p", 10, 1, time.Hour)
		db.Execute(strings.ReplaceAll(string(grant), " to app", " to "+role))
		for _, call := range []string{"ratelimit_acquire('p', 'k')", "ratelimit_acquire_all('{p,p}', '{k,l}')"} {
			require.NoError(t, kit.ErrorOf(kit.PoolAs(t, db.DB, role).Exec(t.Context(), "select "+call)), page)
		}
	}
}

func TestMain(m *testing.M) { pgtest.Main(m) }
