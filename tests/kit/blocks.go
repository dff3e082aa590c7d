package kit

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// A DocsFile is one page, by its path from the repository's root.
type DocsFile struct {
	Path   string
	Text   string
	Blocks []DocsBlock
}

type DocsBlock struct {
	Tag, Text string
	Line      int // of its first line
}

func DocsFiles(t testing.TB) (files []DocsFile) {
	var paths []string
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../docs/examples/*.md", "../../pg_cron/*.md"} {
		found := NoError(filepath.Glob(pattern))(t)
		require.NotEmpty(t, found, pattern)
		paths = append(paths, found...)
	}
	for _, path := range paths {
		text := NoError(os.ReadFile(path))(t)
		blocks, err := DocsBlocks(string(text))
		require.NoError(t, err, path)
		files = append(files, DocsFile{strings.TrimPrefix(path, "../../"), string(text), blocks})
	}
	return files
}

var docsTags = []string{"sql", "psql", "go", "sh", "text", "yaml"}

func DocsBlocks(text string) (blocks []DocsBlock, err error) {
	var open *DocsBlock
	for i, line := range strings.Split(text, "\n") {
		fence, isFence := strings.CutPrefix(strings.TrimLeft(line, " "), "```")
		switch {
		case isFence && open == nil:
			if !slices.Contains(docsTags, fence) {
				return nil, fmt.Errorf("line %d: a block has the tag %q; the tags are %v", i+1, fence, docsTags)
			}
			open = &DocsBlock{Tag: fence, Line: i + 2}
		case isFence:
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.Text += line + "\n"
		}
	}
	if open != nil {
		return nil, fmt.Errorf("line %d: a block does not end", open.Line)
	}
	return blocks, nil
}

// PoolAs is a pool whose sessions have a role.
func PoolAs(t *testing.T, db *pgtest.DB, role string) *pgxpool.Pool {
	config := NoError(pgxpool.ParseConfig(db.URL))(t)
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return ErrorOf(conn.Exec(ctx, "set role "+role)) }
	pool := NoError(pgxpool.NewWithConfig(context.Background(), config))(t)
	t.Cleanup(pool.Close)
	return pool
}
