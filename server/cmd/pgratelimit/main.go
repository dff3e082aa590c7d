// Command pgratelimit serves token bucket rate limits that live in PostgreSQL, installs them, and asks them.
//
//	pgratelimit serve
//	pgratelimit install
//	pgratelimit acquire api user:42 --cost 5
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second signal ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run is main without a process.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) (code int) {
	var p program
	root := p.command()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	needShell(root)
	err := root.ExecuteContext(ctx)
	var no answerNo
	if err != nil && !errors.As(err, &no) {
		p.json = p.json || slices.Contains(args, "--json") // which is not read where a flag before it is wrong
		p.complain(stderr, err)
	}
	return exitCode(err)
}

// A program is what the flags of every command say.
type program struct {
	databaseURL string
	shardURLs   string // of databases that the program has created
	json        bool
}

func (p *program) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "pgratelimit",
		Short: "Token bucket rate limits that live in PostgreSQL",
		Long: `Token bucket rate limits that live in PostgreSQL.

Exit codes:
   0  done; allowed; nothing to complain of
   1  an error
   2  no error, but a no: denied, doctor has findings, or apply --dry-run a difference
  64  the command line is wrong
  69  the database cannot be reached`,
		Args:          atMost(0),
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.PersistentFlags().StringVar(&p.databaseURL, "database-url", "", "the database (default $DATABASE_URL, or all of $SHARD_URLS)")
	root.PersistentFlags().BoolVar(&p.json, "json", false, "print JSON")
	root.AddCommand(
		p.serve(), p.health(),
		p.install(), p.uninstall(), p.apply(), p.export(),
		p.policies(), p.override(), p.reset(),
		p.status(), p.doctor(),
		p.acquire(), p.peek(),
		p.version(),
	)
	return root
}

// needShell makes completion without a shell an error: its help would end up in the script. What the command writes goes to the
// output that root has by now.
func needShell(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	completion, _, err := root.Find([]string{"completion"})
	if err != nil {
		return
	}
	completion.Args = cobra.ArbitraryArgs
	completion.RunE = func(*cobra.Command, []string) error {
		return usageError{errors.New("which shell? Write pgratelimit completion bash, zsh, fish or powershell")}
	}
}

// exactly and atMost make cobra's complaints about arguments usage errors.
func exactly(n int) cobra.PositionalArgs { return usage(cobra.ExactArgs(n)) }
func atMost(n int) cobra.PositionalArgs  { return usage(cobra.MaximumNArgs(n)) }

func usage(args cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, given []string) error {
		if !c.HasParent() && len(given) > 0 {
			return usageError{fmt.Errorf("no command is called %q: see pgratelimit --help", given[0])}
		}
		if err := args(c, given); err != nil {
			return usageError{fmt.Errorf("%w\nusage: %s", err, strings.TrimSpace(c.UseLine()))}
		}
		return nil
	}
}
