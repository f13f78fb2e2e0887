/* inside_main.c - the program of inside.c.  Tests that do not look inside take their amp.h from it as well. */
int inside(int argc, char **argv);
int main(int argc, char **argv) { return inside(argc, argv); }
